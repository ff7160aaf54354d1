"""How fast a pipeline could be if computing took no time: bytes on the busiest link, and the way to the end and back.

A bound for the whole step, fill and drain included; nothing that is not on the link. Framing is the transport's.
"""

import torch

from benchmarks.links.workload import Run
from thinpipe.boundary.contract import MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.transport.emulation.framing import wire_nbytes


def message_nbytes(run: Run) -> tuple[int, int]:
    """On the wire, per micro-batch and boundary: the state with the ids going forward, and the gradient going back."""
    shape = run.shape
    message = MessageShape(
        batch=shape.sequences,
        tokens=shape.seq_len,
        width=run.width or shape.dim,
        vocab_size=shape.vocab,
        dtype=torch.bfloat16 if shape.bf16 else torch.float32,
    )
    method = make_method(run.config.boundary, message, in_subspace=run.width is not None, seed=0)
    return wire_nbytes(method.forward_nbytes), wire_nbytes(method.backward_nbytes)


def busiest_nbytes(run: Run) -> int:
    """Per micro-batch, on the busiest link in its busiest direction. A middle stage's uplink carries states and
    gradients."""
    forward, backward = message_nbytes(run)
    return max(forward, backward) if run.shape.stages == 2 else forward + backward


def link_bound_seconds(run: Run) -> float:
    """The least that a step can take on this link; 0 at full speed."""
    link, shape = run.link, run.shape
    if link.mbps is None and not link.round_trip_ms:
        return 0.0
    per_byte = 0.0 if link.mbps is None else 8e-6 / link.mbps
    forward, backward = (nbytes * per_byte for nbytes in message_nbytes(run))
    hops, rest, latency = shape.stages - 1, shape.microbatches - 1, link.round_trip_ms / 2e3
    # The first state has to reach the last stage, the last gradient the first one; all other states follow the first.
    way_there = hops * (forward + latency)
    way_back = hops * (backward + latency)
    if run.schedule == "GPipe":  # the last stage turns round only when it has every state
        return way_there + rest * forward + way_back + rest * backward
    there_and_back = way_there + rest * forward + way_back
    # Or the link of a stage in the middle decides: idle until the first state comes, and then one hop from the end.
    middle = forward + latency + shape.microbatches * (forward + backward) + latency if hops > 1 else 0.0
    return max(there_and_back, middle)


def break_even_mbps(run: Run, compute_seconds: float) -> float:
    """The rate at which sending a step takes as long as computing it; above it, the link no longer decides."""
    return busiest_nbytes(run) * run.shape.microbatches * 8e-6 / compute_seconds
