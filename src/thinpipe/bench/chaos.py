"""`thinpipe bench chaos`: lets the faults happen, computes the undisturbed run, compares, and writes what came out."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from thinpipe.bench import chaos_disk, chaos_networks, chaos_summary
from thinpipe.bench.chaos_blame import Bad
from thinpipe.bench.chaos_conduct import conduct
from thinpipe.bench.chaos_config import HUB, ChaosConfig
from thinpipe.bench.chaos_figure import draw
from thinpipe.bench.chaos_judge import Facts, judge
from thinpipe.bench.chaos_log import Committed, read_log
from thinpipe.bench.chaos_poison import read_injections
from thinpipe.bench.chaos_results import SeedResult
from thinpipe.bench.chaos_truth import Truth
from thinpipe.bench.provenance import plain_settings, versions
from thinpipe.core.errors import UserError

_NAMED = re.compile(r"step:\s+(\d+)\s+(?:retried|skipped): .* from (\S+?)(?:[;,]|$)")


def run(config: ChaosConfig) -> int:
    """Exit code 1 when anything was not as it must be; the page and standard error say what, and how to do it again."""
    _refuse_what_cannot_happen(config)
    _refuse_other_settings(config)
    with leaving_cleanly():
        conduct(config, _say)
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
        raise UserError(f"{why}. Or pass --without-cuts, and no line is cut")
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
    truth = Truth(config)
    truth.compute(max((record.step for record in records if isinstance(record, Committed)), default=0), _say)
    facts = Facts(
        commits=truth.commits, steps=truth.steps, poisoned=_poisoned(config), shown=shown_by(config.folder / "printed")
    )
    result = judge(config, records, facts)
    (config.folder / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    return result


def _poisoned(config: ChaosConfig) -> list[Bad]:
    return [
        Bad(peer, injection.place.step, injection.time_s)
        for peer in config.peers
        for injection in read_injections(config.poison_log(peer))
    ]


def shown_by(printed: Path) -> list[tuple[str, int]]:
    """Who was named on the hub's screen, and for which step."""
    lines = (printed / f"{HUB}.out").read_text(errors="replace").splitlines()
    return [(found[2], int(found[1])) for line in lines if (found := _NAMED.match(line))]


def write_results(config: ChaosConfig) -> str:
    """chaos.json, chaos.md and the figure, of all seeds that are there; returns the page."""
    folders = sorted(path.parent for path in config.output.glob("seed-*/result.json"))
    results = [msgspec.json.decode((folder / "result.json").read_bytes(), type=SeedResult) for folder in folders]
    facts = {**versions(), "cores": os.cpu_count() or 0}
    text = ", ".join(f"{name} {value}" for name, value in facts.items())
    setting = (
        f"{config.stages} stages and {config.spares} spare, one thread per process; a commit every "
        f"{config.steps_per_commit} steps; lost after {config.lost_after_seconds:g} s."
    )
    page = chaos_summary.page(results, f"{text}; {setting}")
    (config.output / "chaos.md").write_text(page, encoding="utf-8")
    whole = {"bench": "chaos", "config": _settings(config), "versions": facts}
    seeds = [msgspec.to_builtins(result) | {"throughput_kept": result.throughput_kept} for result in results]
    (config.output / "chaos.json").write_text(json.dumps(whole | {"seeds": seeds}) + "\n", encoding="utf-8")
    _draw([(result.seed, folder) for result, folder in zip(results, folders, strict=True)], config.output / "chaos.png")
    return page


def _draw(seeds: list[tuple[int, Path]], path: Path) -> None:
    draw([(seed, list(read_log(folder / "log.jsonl"))) for seed, folder in seeds], path)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
