"""Segments as stages: torch.distributed.pipelining drives them, messages cross between them.

`chain` is what a process computes; with all segments in it, it is the twin: the ground truth for any placement.
"""
