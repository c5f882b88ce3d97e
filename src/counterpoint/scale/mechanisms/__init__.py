"""What a step gains by one mechanism at a time, and by one that this library has not."""
