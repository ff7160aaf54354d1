"""Event logs as runs write them."""

from thinpipe.config.run import ModelSettings, RunConfig, TrainingConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import EventLog, LinkTraffic, Saved, Started, Step, Stopped, Validated

TOKENS = 128


def settings(**fields):
    section = {"dim": 64, "boundaries": (1, 2)} | fields
    return RunConfig(model=ModelSettings(**section), training=TrainingConfig(steps=80))


def started(step=0, **fields):
    versions = {"thinpipe": "0.1.0", "torch": "2.13.0"}
    return Started(**{"step": step, "config": dump_toml(settings()), "parameters": 1234, "versions": versions} | fields)


def step(number, *, loss=None, processes=1, **fields):
    """Of one process, or of several in a row, in which process 0 waits for nobody."""
    links = [
        LinkTraffic(boundary=index, forward=forward, nbytes=800, waited_s=waited, mbps=0.008)
        for index in range(processes - 1)
        for forward, waited in ((True, 0.2), (False, 0.0))
    ]
    busy = [1.0, *[0.75] * (processes - 1)] if processes > 1 else []
    every = {
        "step": number,
        "loss": 5.0 - number / 100 if loss is None else loss,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": number * TOKENS,
        "seconds": 1.0,
        "tokens_per_second": float(TOKENS),
        "links": links,
        "busy": busy,
    }
    return Step(**every | fields)


def validated(number, loss):
    return Validated(step=number, loss=loss, bits_per_byte=loss / 2, tokens=100, seconds=0.5)


def saved(number):
    return Saved(step=number, path="x", nbytes=10, seconds=0.25)


def stopped(number, reason="finished"):
    return Stopped(step=number, reason=reason)


def write(folder, *events):
    with EventLog(folder / "events.jsonl") as log:
        for event in events:
            log.write(event)
    return folder
