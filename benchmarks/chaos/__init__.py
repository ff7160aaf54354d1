"""`python -m benchmarks.chaos`: real faults at moments drawn from a seed, and whether the run was disturbed."""
