"""Runs far larger than any that was tried, by the clock of `thinpipe plan`: python -m benchmarks.scale --output DIR."""
