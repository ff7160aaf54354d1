"""Events of a run that nobody computed."""

from thinpipe.core.events import LinkTraffic, Started, Step
from thinpipe.core.hub_events import PeerAssignment

TOKENS, DIM = 1000, 128


def started(steps=100, **fields):
    config = f"[training]\nsteps = {steps}\n"
    return Started(**{"step": 0, "config": config, "parameters": 5, "versions": {}, "dim": DIM} | fields)


def link(boundary, forward, nbytes=25_600, waited_s=0.5, mbps=2.0):
    return LinkTraffic(boundary=boundary, forward=forward, nbytes=nbytes, waited_s=waited_s, mbps=mbps)


def step(number, *, time_s=None, seconds=2.0, **fields):
    every = {
        "step": number,
        "loss": 5.0 - number / 100,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": number * TOKENS,
        "seconds": seconds,
        "tokens_per_second": TOKENS / seconds,
        "time_s": 1000.0 + 3 * number if time_s is None else time_s,
    }
    return Step(**every | fields)


def peers(*names):
    return [PeerAssignment(name=name, segments=[index], up_bps=1e7) for index, name in enumerate(names)]
