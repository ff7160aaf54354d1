"""Emulated home internet links in front of a process group: bandwidth, latency, jitter and framing overhead."""
