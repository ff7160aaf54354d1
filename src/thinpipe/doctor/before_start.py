"""What a program finds on this machine before it starts: memory, disk, tokens, versions and ports, speed, a line each.

Reads sizes, manifests and the end of an earlier log, in less than a second and without torch; measures nothing and
hashes nothing, as `thinpipe doctor` does. On a terminal all five are shown, elsewhere those alone that ask for a
change. What cannot work at all is refused here or by the program itself.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from thinpipe.config.hub import HubConfig, JoinConfig, UpConfig
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.numerics import INSTALL_TORCH, TESTED_TORCH, is_tested_torch, numerics
from thinpipe.core.run_folder import events_path
from thinpipe.core.units import format_bytes
from thinpipe.data import has_tokens
from thinpipe.data.manifest import read_manifest
from thinpipe.device.host import is_surely_cpu
from thinpipe.doctor.disk_and_port import disk_finding, port_finding
from thinpipe.doctor.finding import Finding, not_checked, ok, problem, warning
from thinpipe.planning.fitting import LocalFit
from thinpipe.planning.model_shape import resolve_model
from thinpipe.planning.segment_costs import segment_costs, segment_needs, shared_nbytes
from thinpipe.planning.stored_model import PlannedModel, stored_model_of
from thinpipe.swarm.hub.memory_check import check_hub, check_up
from thinpipe.training.memory_check import host_budget

_TAIL_NBYTES = 1 << 18
_LITTLE_NBYTES = 2_000_000_000


def train(config: RunConfig) -> None:
    """Nothing for a process that another one launched."""
    if "RANK" not in os.environ:
        model = _model(config)
        show(
            [
                _memory(config, model),
                disk_finding(config, model),
                _tokens(config),
                _versions("no port is needed"),
                _speed(config.job.dump_folder, "`thinpipe plan FILE --machines here` measures and plans"),
            ]
        )


def hub(config: HubConfig) -> None:
    """Raises UserError for a model of which the hub cannot make the first weights."""
    check_hub(config)
    run, port = config.as_run(), port_finding(config)
    model = _model(run)
    show(
        [
            _largest_segment(run, model),
            disk_finding(run, model),
            _tokens(run),
            _versions(port.text.partition(";")[0], port),
            _speed(run.job.dump_folder, "planned when the machines have joined and were measured"),
        ]
    )


def up(config: UpConfig) -> None:
    """Raises UserError if a hub and its peers do not fit on this machine together."""
    check_up(config)
    run = config.as_hub().as_run()
    model = _model(run)
    show(
        [
            _largest_segment(run, model),
            disk_finding(run, model),
            _tokens(run),
            _versions("any free port of this machine alone"),
            _speed(run.job.dump_folder, "planned when the peers have joined and were measured"),
        ]
    )


def join(config: JoinConfig) -> None:
    folder = next(each for each in ((config.folder or Path()).absolute(), Path("/")) if each.is_dir())
    free = shutil.disk_usage(folder).free
    text = f"{format_bytes(free)} free in {folder} for this machine's part"
    show(
        [
            _offered(config),
            ok("disk", text) if free > _LITTLE_NBYTES else warning("disk", text, "Free some, or choose a --folder."),
            ok("tokens", "none are needed: the hub sends what this machine computes on"),
            _versions("no port is opened: this machine dials the hub"),
            ok("speed", "measured when the hub asks for it; the hub then says what it expects of all"),
        ]
    )


def show(findings: Iterable[Finding]) -> None:
    on_terminal = sys.stdout.isatty()
    for finding in findings:
        if on_terminal or finding.fix:
            fix = f" To do: {finding.fix}" if finding.fix else ""
            print(f"{finding.what + ':':<10}{finding.text}{'.' if fix else ''}{fix}", flush=True)


def _model(config: RunConfig) -> PlannedModel | None:
    """None if its size is not known here, which the run itself explains. Of a model on the Hugging Face hub headers are
    read there."""
    with suppress(UserError):
        return resolve_model(config, None)[0] if config.model.hf is None else stored_model_of(config)
    return None


def _guarded(what: str, find: Callable[[], Finding]) -> Finding:
    """Settings that cannot run are refused by the run itself, in more words."""
    try:
        return find()
    except UserError as error:
        return not_checked(what, str(error))


def _memory(config: RunConfig, model: PlannedModel | None) -> Finding:
    if model is None:
        return not_checked("memory", "the size of the model is not known yet")
    if not is_surely_cpu(config.training.device):
        return not_checked("memory", "of the graphics card: compared when it is opened, before weights are made")
    processes = config.parallelism.pipeline_parallel_degree
    fit = LocalFit(model=model, budget=host_budget(), ranks=tuple(range(processes)), starting=processes)

    def find() -> Finding:
        need, usable = fit.judge(config), format_bytes(fit.budget.usable_nbytes)
        text = f"the run needs {format_bytes(need.nbytes)}, and {usable} can be used"
        return ok("memory", text) if need.fits else problem("memory", text, f"{fit.advice(config)[0]}.")

    return _guarded("memory", find)


def _largest_segment(config: RunConfig, model: PlannedModel | None) -> Finding:
    if model is None:
        return not_checked("memory", "the size of the model is not known yet")

    def find() -> Finding:
        needs = [need.memory_nbytes for need in segment_needs(segment_costs(model, config), config)]
        largest = format_bytes(max(needs) + shared_nbytes(model, config))
        return ok("memory", f"{len(needs)} segments, of which the largest takes {largest} of the machine that has it")

    return _guarded("memory", find)


def _offered(config: JoinConfig) -> Finding:
    if not is_surely_cpu(config.device):
        return not_checked("memory", "of the graphics card, if torch sees one: measured when the hub asks for it")
    budget = host_budget()
    offered = format_bytes(budget.offered_nbytes(config.memory_nbytes))
    return ok("memory", f"{offered} are offered of {format_bytes(budget.free_nbytes)} that are free (--memory)")


def _tokens(config: RunConfig) -> Finding:
    data, training = config.data, config.training
    missing = next((path for path in data.folders if not has_tokens(path / "train")), None)
    if missing is not None:
        setting = "data.mixture" if data.mixture else "data.path"
        return problem("tokens", f"none in {missing}", f"thinpipe tokenize --output {missing}, or set {setting}.")

    def find() -> Finding:
        found = []
        for path, weight in zip(data.folders, data.weights, strict=True):
            tokens, share = read_manifest(path / "train").tokens, weight / sum(data.weights)
            reads = share * training.steps * training.global_batch_size * training.seq_len
            times = f"{reads / tokens:.1f} times" if reads >= tokens else "not even once"
            of_steps = f"{training.steps:,} steps" + (f" at {share:.1%}" if data.mixture else "")
            there = "with" if has_tokens(path / "validation") else "without"
            found.append(f"{tokens:,} in {path}, which {of_steps} read {times}; {there} validation text")
        return ok("tokens", "; ".join(found))

    return _guarded("tokens", find)


def _versions(ports: str, port: Finding | None = None) -> Finding:
    """`ports`: of the ports, in words; `port`: what was found of a hub's."""
    mine = numerics()
    text = f"Python {platform.python_version()}, torch {mine.torch}, numerics {mine.version}; {ports}"
    if not is_tested_torch(mine.torch):
        return warning("versions", text, f"torch {', '.join(TESTED_TORCH)} were tested: {INSTALL_TORCH}")
    return ok("versions", text) if port is None or not port.fix else problem("versions", text, port.fix)


def _speed(folder: Path, unknown: str) -> Finding:
    """What an earlier start in this folder expected and reached."""
    reached, planned = (
        _newest(folder, "step", "tokens_per_second"),
        _newest(folder, "generation_started", "planned_tokens_per_second"),
    )
    said = [f"{planned:,.0f} tokens/s were planned"] if planned else []
    said += [f"{reached:,.0f} tokens/s were reached in the newest step"] if reached else []
    return ok("speed", f"{' and '.join(said)} in {folder}" if said else f"not known before the first step; {unknown}")


def _newest(folder: Path, event: str, figure: str) -> float:
    """The figure of the newest such event near the end of a log; 0: there is none."""
    with suppress(OSError):
        with events_path(folder).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_NBYTES))
            lines = log.read().splitlines()
        for line in reversed(lines):
            with suppress(msgspec.DecodeError):
                found: Any = msgspec.json.decode(line)
                if isinstance(found, dict) and found.get("event") == event:
                    value = found.get(figure)
                    return float(value) if isinstance(value, int | float) else 0.0
    return 0.0
