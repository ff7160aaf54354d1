"""Segments as stages: torch.distributed.pipelining drives them, messages cross between them. The only importer of it.

`twin` runs all segments in one process and sends the same messages to itself: the ground truth for any placement.
"""
