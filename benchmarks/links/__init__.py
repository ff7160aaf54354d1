"""`python -m benchmarks.links`: a pipeline over emulated links, against its bounds and the bare engine."""
