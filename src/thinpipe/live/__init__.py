"""A run while it runs: in the terminal, on a local page, and in what others read. Shows events; computes nothing."""
