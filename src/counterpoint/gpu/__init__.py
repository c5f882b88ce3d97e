"""A GPU as the driver tells of it: limits, footprints of kernels, copies, graphs."""
