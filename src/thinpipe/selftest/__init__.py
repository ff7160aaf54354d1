"""`thinpipe selftest`: proves on the user's own machine that its device computes right, and measures it."""
