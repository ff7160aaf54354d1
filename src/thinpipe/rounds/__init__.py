"""Rounds: replicas train apart for some steps, then merge what their weights have changed by (local SGD, DiLoCo)."""
