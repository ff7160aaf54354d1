"""`python -m benchmarks.chaos`: lets the faults happen, computes the undisturbed run, compares, and writes what came
out."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.chaos import networks as chaos_networks
from benchmarks.chaos import report as chaos_summary
from benchmarks.chaos import small_disks as chaos_disk
from benchmarks.chaos.attacks.order import read_deeds
from benchmarks.chaos.attribution import BadMessage
from benchmarks.chaos.config import ChaosConfig
from benchmarks.chaos.figure import draw
from benchmarks.chaos.log import AnyRecord, Committed, Happened, read_log
from benchmarks.chaos.poison import read_injections
from benchmarks.chaos.reference_run import ReferenceRun
from benchmarks.chaos.results import SeedResult
from benchmarks.chaos.runner import run_schedule
from benchmarks.chaos.verdict import Facts, judge
from benchmarks.command_line import run_benchmark
from benchmarks.provenance import plain_settings, versions
from thinpipe.core.errors import UserError
from thinpipe.core.events import Step


def run(config: ChaosConfig) -> int:
    """Exit code 1 when anything was not as it must be; the page and standard error say what, and how to do it again."""
    _refuse_what_cannot_happen(config)
    _refuse_other_settings(config)
    with leaving_cleanly():
        run_schedule(config, _say)
    result = compare(config)
    print(write_results(config))
    for failure in result.failures:
        _say(f"seed {config.seed} failed: {failure}")
    if result.failures:
        _say(f"the same again: {config.command}")
    return 1 if result.failures else 0


@contextlib.contextmanager
def leaving_cleanly() -> Iterator[None]:
    """SIGTERM ends us as Ctrl+C does: programs, networks and mounted disks go with us."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refuse_what_cannot_happen(config: ChaosConfig) -> None:
    if not config.without_cuts and (why := chaos_networks.missing()) is not None:
        raise UserError(f"{why}. Or pass --without-cuts, and no link is cut")
    if "disk" in config.kinds and (why := chaos_disk.missing()) is not None:
        raise UserError(f"{why}. Or leave `disk` out of --faults")


def _refuse_other_settings(config: ChaosConfig) -> None:
    """A seed's folder belongs to the settings it was begun with."""
    config.folder.mkdir(parents=True, exist_ok=True)
    file, settings = config.folder / "settings.json", _settings(config)
    if file.exists() and (before := json.loads(file.read_text())) != settings:
        changed = [name for name in settings if settings[name] != before.get(name)]
        raise UserError(
            f"{config.folder} was begun with other settings ({', '.join(changed)}): "
            "give the same ones, or another --output or --seed"
        )
    file.write_text(json.dumps(settings) + "\n")


def _settings(config: ChaosConfig) -> dict[str, object]:
    """Without the place, which is no matter."""
    settings: dict[str, object] = json.loads(json.dumps(plain_settings(config)))
    del settings["output"]
    return settings


def compare(config: ChaosConfig) -> SeedResult:
    """With the undisturbed run, as far as that has to be computed. Kept in the folder of the seed."""
    records = list(read_log(config.folder / "log.jsonl"))
    truth = ReferenceRun(config)
    truth.compute(max((record.step for record in records if isinstance(record, Committed)), default=0), _say)
    deeds = list(read_deeds(config.attack_deeds))
    facts = Facts(commits=truth.commits, steps=truth.steps, poisoned=_poisoned(config), deeds=deeds)
    result = judge(config, records, facts)
    (config.folder / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    return result


def _poisoned(config: ChaosConfig) -> list[BadMessage]:
    return [
        BadMessage(peer, injection.place.step, injection.time_s)
        for peer in config.peers
        for injection in read_injections(config.poison_log(peer))
    ]


def write_results(config: ChaosConfig) -> str:
    """chaos.json, chaos.md and the figure, of all seeds that are there; returns the page."""
    folders = sorted(path.parent for path in config.output.glob("seed-*/result.json"))
    results = [msgspec.json.decode((folder / "result.json").read_bytes(), type=SeedResult) for folder in folders]
    facts = {**versions(), "cores": os.cpu_count() or 0}
    text = ", ".join(f"{name} {value}" for name, value in facts.items())
    setting = (
        f"{config.stages} stages and {config.standbys} standby, one thread per process; a commit every "
        f"{config.steps_per_commit} steps; lost after {config.heartbeat_timeout_seconds:g} s."
    )
    page = chaos_summary.page(results, f"{text}; {setting}")
    (config.output / "chaos.md").write_text(page, encoding="utf-8")
    whole = {"bench": "chaos", "config": _settings(config), "versions": facts}
    seeds = [msgspec.to_builtins(result) | {"throughput_kept": result.throughput_kept} for result in results]
    (config.output / "chaos.json").write_text(json.dumps(whole | {"seeds": seeds}) + "\n", encoding="utf-8")
    runs = zip(results, folders, strict=True)
    draw([(result.seed, _without_forged(result, folder)) for result, folder in runs], config.output / "chaos.png")
    return page


def _without_forged(result: SeedResult, folder: Path) -> list[AnyRecord]:
    """Steps that differ from the undisturbed run are no progress."""
    forged = set(result.steps_unequal)
    return [
        record
        for record in read_log(folder / "log.jsonl")
        if not (isinstance(record, Happened) and isinstance(record.event, Step) and record.event.step in forged)
    ]


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_benchmark("chaos", ChaosConfig, run))
