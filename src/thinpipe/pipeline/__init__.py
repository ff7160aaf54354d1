"""Pipeline parallelism: model segments as stages of torch.distributed.pipelining that exchange encoded messages.

`stage_module` is the module of one stage. With all segments in one process it is the twin: the single-process reference
whose results every placement must reproduce bit for bit.
"""
