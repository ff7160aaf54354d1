"""The device that a process computes on: which one, its memory and name, random numbers, copies to and from the host.

No other package names a type of device (tests/device/test_one_place.py). CUDA, ROCm (which torch calls cuda), MPS, XPU
and backends of others are reached through torch's own names for "the accelerator of this machine".
"""
