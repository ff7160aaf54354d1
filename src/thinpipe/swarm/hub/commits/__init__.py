"""Commits: checkpoints that are complete at the hub, the log and ledger of them, and the interval between two."""
