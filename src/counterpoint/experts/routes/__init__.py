"""Which token goes to which expert: found, told to peers, laid out as lists."""
