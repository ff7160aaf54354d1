"""`python -m benchmarks.step`: time and memory of one training step, subspace against dense."""
