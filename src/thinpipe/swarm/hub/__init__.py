"""The hub of a run: membership, generations, liveness, commits, admission and the services that peers call."""
