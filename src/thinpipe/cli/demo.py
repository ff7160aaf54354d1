"""`thinpipe demo`: three short runs of real processes on this machine, and one picture of them.

Thick and thin: four processes behind emulated links (`[link]`) train the same time with whole states in bfloat16, and
in a subspace. Then four peers of a hub train, and one is killed and started again.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from rich.console import Console

from thinpipe.cli.demo_figure import Curve, KilledPeer, draw_demo
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.commands import DemoConfig
from thinpipe.config.data import TokenizeConfig
from thinpipe.config.link import LinkConfig
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
    CheckpointConfig,
    DataConfig,
    JobConfig,
    LRSchedulerConfig,
    ModelSettings,
    OptimizerConfig,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent, Step
from thinpipe.core.extras import require_extra
from thinpipe.core.files import write_atomically
from thinpipe.core.process_group import NEW_PROCESS_GROUP
from thinpipe.data import prepare
from thinpipe.monitor.log_follower import LogFollower

_TERMINATED = threading.Event()
"""Set by SIGTERM: the demo ends where it can end its programs too."""
_PEERS, _WIDTH, _VOCABULARY = 4, 16, 2048
_STEPS = 100_000
"""More than there is time for."""
_START_SECONDS, _END_SECONDS, _LOOK_SECONDS, _SAID_SECONDS = 180.0, 30.0, 0.2, 5.0
_KILL_SHARE, _GONE_SECONDS = 0.35, 3.0
"""When a peer is killed, as a share of the time; and how long it stays away."""


def run(config: DemoConfig) -> None:
    require_extra("matplotlib", extra="report", feature="the picture of the demo")
    if config.folder.exists() and any(config.folder.iterdir()):
        raise UserError(f"{config.folder} holds something already: name another folder, `thinpipe demo FOLDER`")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, lambda *_: _TERMINATED.set())
    console.print(f"about {3 * (config.seconds + 20) / 60:.0f} minutes; everything stays in {config.folder}")
    tokens = config.folder / "tokens"
    sources = TokenizeConfig(sources=("sample:train",), output=tokens, vocab_size=_VOCABULARY)
    prepare(sources)
    console.print(f"1 of 3: whole states (bf16) between {_PEERS} processes behind links of {config.rate}")
    thick = _train(_on_links(config, tokens, width=None), config, console)
    console.print(f"2 of 3: the same links, {_WIDTH} numbers a token instead of 256")
    thin = _train(_on_links(config, tokens, width=_WIDTH), config, console)
    console.print(f"3 of 3: {_PEERS} peers of a hub; one is killed in the middle")
    friends, killed = _train_with_a_kill(_with_hub(config, tokens), config, console)
    picture = config.folder / "demo.png"
    draw_demo(thick, thin, friends, killed, links=f"{config.rate}, {config.latency}", path=picture)
    for line in [*_thick_against_thin(thick, thin), _kill_in_words(killed), f"picture: {picture}"]:
        console.print(line)


def _on_links(config: DemoConfig, tokens: Path, width: int | None) -> RunConfig:
    return RunConfig(
        job=JobConfig(dump_folder=config.folder / ("thick" if width is None else "thin")),
        data=DataConfig(path=tokens),
        model=ModelSettings(
            dim=256,
            n_heads=4,
            n_kv_heads=1,
            hidden_dim=256,
            boundaries=(1, 2, 3),
            subspace=SubspaceConfig(width=width),
        ),
        training=TrainingConfig(steps=_STEPS, global_batch_size=64, seq_len=64, device="cpu"),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=_PEERS,
            pipeline_parallel_microbatch_size=8,
            pipeline_parallel_extra_microbatches=4,
        ),
        boundary=BoundaryConfig(forward="bf16", backward="bf16" if width is None else "int8"),
        link=LinkConfig(up=config.rate, down=config.rate, latency=config.latency),
        optimizer=OptimizerConfig(lr=3e-3),
        lr_scheduler=LRSchedulerConfig(warmup_steps=5),
        basis=BasisConfig(interval=0),
        validation=ValidationConfig(freq=0),
        checkpoint=CheckpointConfig(interval=_STEPS),
    )


def _with_hub(config: DemoConfig, tokens: Path) -> RunConfig:
    on_links = _on_links(config, tokens, _WIDTH)
    return replace(
        on_links,
        job=JobConfig(dump_folder=config.folder / "friends"),
        training=replace(on_links.training, global_batch_size=16),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=2),
        link=LinkConfig(),
        checkpoint=CheckpointConfig(interval=10),
    )


def _train(run: RunConfig, config: DemoConfig, console: Console) -> Curve:
    with _program(run, "train") as program:
        return Curve.of(_steps(program, config.seconds, console))


def _train_with_a_kill(run: RunConfig, config: DemoConfig, console: Console) -> tuple[Curve, KilledPeer]:
    """A peer is killed, and joins again with the key in its folder."""
    with contextlib.ExitStack() as stack:
        program = stack.enter_context(_program(run, "up", "--peers", str(_PEERS)))
        killed_at, folder = 0.0, ""

        def kill() -> None:
            nonlocal killed_at, folder
            peer = _last_peer(program.process)
            folder, killed_at = _folder_of(peer), time.time()
            peer.kill()
            console.print("    killed a peer (SIGKILL)")

        def start_again() -> None:
            console.print("    started it again, with the key in its folder")
            stack.enter_context(_running(["join", folder], program.folder / "again.log"))

        moment = _KILL_SHARE * config.seconds
        events = _events(program, config.seconds, console, [(moment, kill), (moment + _GONE_SECONDS, start_again)])
    return Curve.of([event for event in events if isinstance(event, Step)]), KilledPeer.of(events, killed_at)


@dataclass(frozen=True)
class _Program:
    process: "subprocess.Popen[bytes]"
    folder: Path
    """Of its run."""
    output: Path


@contextlib.contextmanager
def _program(run: RunConfig, *verb: str) -> Iterator[_Program]:
    """`thinpipe VERB` on these settings, until the end of the block."""
    folder = run.job.dump_folder
    folder.mkdir(parents=True)
    settings, output = folder / "settings.toml", folder / "output.log"
    write_atomically(settings, dump_toml(run).encode())
    with _running([verb[0], str(settings), *verb[1:]], output) as process:
        yield _Program(process, folder, output)


@contextlib.contextmanager
def _running(arguments: Sequence[str], output: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A thinpipe program, which is asked to stop at the end of the block, and then killed with all that it started."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "thinpipe", *arguments],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
            creationflags=NEW_PROCESS_GROUP,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.Error):
            started = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            for each in [*started, process]:
                with contextlib.suppress(psutil.Error, OSError):
                    each.kill()
        process.wait()


def _steps(program: _Program, seconds: float, console: Console) -> list[Step]:
    return [event for event in _events(program, seconds, console) if isinstance(event, Step)]


def _events(
    program: _Program, seconds: float, console: Console, moments: Sequence[tuple[float, Callable[[], None]]] = ()
) -> list[AnyEvent]:
    """What the run logs in this time from its first step on, while it says every few seconds how it goes. `moments`:
    actions, each with its seconds after the first step. Raises UserError if there is no first step."""
    log, found, due = LogFollower(program.folder), list[AnyEvent](), sorted(moments, key=lambda moment: moment[0])
    began, first, said = time.monotonic(), 0.0, time.monotonic()
    while not first or time.monotonic() < first + seconds:
        found += log.poll()
        if _TERMINATED.is_set():
            raise SystemExit(128 + signal.SIGTERM)
        now = time.monotonic()
        newest = next((event for event in reversed(found) if isinstance(event, Step)), None)
        if newest is not None and not first:
            first = now
        if program.process.poll() is not None or (not first and now > began + _START_SECONDS):
            raise UserError(f"a run of the demo did not go on: {program.output} says why")
        while first and due and now >= first + due[0][0]:
            due.pop(0)[1]()
        if now > said + _SAID_SECONDS:
            said = now
            how = "starting" if newest is None else f"loss {newest.loss:.2f}, {newest.tokens_per_second:,.0f} tokens/s"
            left = f", {max(0.0, first + seconds - now):.0f} s left" if first else ""
            console.print(f"    {how}{left}")
        time.sleep(_LOOK_SECONDS)
    return found


def _last_peer(hub: "subprocess.Popen[bytes]") -> "psutil.Process":
    """The program of a peer that the hub's program has started."""
    return [child for child in psutil.Process(hub.pid).children() if "join" in child.cmdline()][-1]


def _folder_of(peer: "psutil.Process") -> str:
    arguments = peer.cmdline()
    if "--folder" in arguments:
        return str(arguments[arguments.index("--folder") + 1])
    return str(arguments[arguments.index("join") + 1])


def _thick_against_thin(thick: Curve, thin: Curve) -> list[str]:
    return [
        f"whole: {thick.nbytes_per_token:,.0f} bytes a token and boundary, {thick.speed:,.0f} tokens/s, loss "
        f"{thick.losses[-1]:.2f} after {thick.seconds[-1]:.0f} s",
        f"thin: {thin.nbytes_per_token:,.0f} bytes a token and boundary, {thin.speed:,.0f} tokens/s, loss "
        f"{thin.losses[-1]:.2f} after {thin.seconds[-1]:.0f} s: {thin.speed / thick.speed:.1f} times the speed",
    ]


def _kill_in_words(killed: KilledPeer) -> str:
    if killed.working_again_at is None:
        return f"{killed.name or 'the peer'} was killed, and the time was over before the run went on"
    pause = killed.working_again_at - killed.killed_at
    return (
        f"{killed.name} was killed at step {killed.step}; {pause:.0f} s later the run went on from its last commit, "
        f"step {killed.from_step}, with the numbers that it would have had anyway"
    )
