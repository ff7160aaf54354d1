"""What a member that floods costs the others: tokens a second, memory of the hub, and who is named when.

    python -m benchmarks.flood --output benchmarks/results/flood

A real hub and three `thinpipe join` train a small model over loopback; a fourth member sends one kind of message as
fast as its socket takes it. All programs share this machine's processors with the flooder and the server, so each rate
is compared with those just before and after it, and the flood that nobody listens to shows what the flooder's own
processor time costs. Kinds are tried in turn, and again in the opposite order.
"""

import re
import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]

from benchmarks.home_swarm import config, steps_of, synthetic_tokens
from tests.programs import Program, invites_of
from tests.swarm.hostile.flooder import Flooder
from thinpipe.config.run import BasisConfig, RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.numerics import numerics
from thinpipe.swarm.peer.accept_invite import accept_invite
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.messages import NextRequest
from thinpipe.transport.nats.store_messages import StoreRequest

PEERS = ("anna", "bert", "carla")
_NEXT = NextRequest(incarnation="a", numerics=numerics())
_STORE = StoreRequest(what="wait", keys=["never"], value=bytes((2 << 20) - 300), wait_seconds=3600.0)
KINDS: dict[str, tuple[str, bytes]] = {
    "no listener": ("hub.mallory.nothing", bytes(1 << 10)),
    "write_file, 1 MB": ("hub.mallory.write_file", bytes(1 << 20)),
    "heartbeat, 1 kB": ("hub.mallory.heartbeat", bytes(1000)),
    "heartbeat, 2 MB": ("hub.mallory.heartbeat", bytes(2_000_000)),
    "store, 2 MB": ("hub.mallory.store", msgspec.msgpack.encode(_STORE)),
    "next": ("hub.mallory.next", msgspec.msgpack.encode(_NEXT)),
    "a peer's subject, 1 MB": (f"m.{PEERS[0]}.mallory.data", bytes(1 << 20)),
}


@dataclass(frozen=True)
class Window:
    """Some seconds of the run."""

    tokens_per_second: float
    hub_nbytes: int
    """Largest memory of the hub."""
    generations: int


@dataclass(frozen=True)
class Trial:
    """One flood."""

    kind: str
    before: Window
    during: Window
    after: Window
    named_seconds: float | None
    """From its start until the owner's console names it; None: not in this trial."""
    messages: int
    nbytes: int

    @property
    def ratio(self) -> float:
        return 2 * self.during.tokens_per_second / (self.before.tokens_per_second + self.after.tokens_per_second)


class Swarm:
    """The hub, three peers that compute, and the key of a fourth."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        run = config(synthetic_tokens(folder / "tokens"), folder / "run", 16, steps=1_000_000)
        training = replace(run.training, global_batch_size=4, seq_len=32)  # many steps in a window
        self.run: RunConfig = replace(run, training=training, basis=BasisConfig(interval=100))
        file = folder / "run.toml"
        file.write_text(dump_toml(self.run))
        peers = ("--hub.peers", 3, "--hub.use-all-peers", "--hub.invites", 4)
        link = ("--hub.address", "127.0.0.1", "--hub.up", "1gbps", "--hub.down", "1gbps")
        self.hub = self._start(stack, folder, "hub", "hub", file, *peers, *link)
        *lines, last = invites_of(self.hub)
        for name, line in zip(PEERS, lines, strict=True):
            self._start(stack, folder, name, "join", line, "--folder", folder / name, "--name", name)
        self.mallory = accept_invite(Invite.read(last), folder / "mallory", name="mallory", numerics=numerics()).address

    @staticmethod
    def _start(stack: ExitStack, folder: Path, name: str, *arguments: object) -> Program:
        program = Program(folder, name, *arguments)
        stack.callback(program.stop)
        return program

    def watch(self, seconds: float, look: Callable[[], None] = lambda: None) -> Window:
        process, peak = psutil.Process(self.hub.process.pid), 0
        began, first = time.monotonic(), len(steps_of(self.run))
        while time.monotonic() - began < seconds:
            peak = max(peak, process.memory_info().rss)
            look()
            time.sleep(0.1)
        steps, took = len(steps_of(self.run)) - first, time.monotonic() - began
        tokens = self.run.training.global_batch_size * self.run.training.seq_len
        return Window(steps * tokens / took, peak, len(re.findall(r"^generation \d+ starts", self.hub.printed, re.M)))

    def flood(self, kind: str, seconds: float) -> Trial:
        subject, body = KINDS[kind]
        before, known = self.watch(seconds), self.hub.printed.count("mallory floods")
        named: list[float] = []

        def look() -> None:
            if not named and self.hub.printed.count("mallory floods") > known:
                named.append(time.monotonic() - began)

        began = time.monotonic()
        with Flooder(self.mallory, subject, body, reply="_INBOX.mallory.z") as flooder:
            during = self.watch(seconds, look)
        self.watch(2.0)
        after = self.watch(seconds)
        return Trial(kind, before, during, after, next(iter(named), None), flooder.sent, flooder.sent * len(body))


def page(trials: list[Trial], seconds: float, command: str) -> list[str]:
    lines = [
        "# A member that floods",
        "",
        f"`{command}`",
        "",
        f"Three honest peers train over loopback, and a fourth member floods for {seconds:g} s. Ratio: tokens a",
        "second during the flood, divided by the mean of before and after. All programs share the processors of one",
        "machine, on which others computed meanwhile: compare the ratios, not the rates.",
        "",
        "| flood of | ratio | tokens/s before, during, after | sent | hub's memory before / during, MB | named after "
        "| generations that began |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        for one in (trial for trial in trials if trial.kind == kind):
            rates = ", ".join(f"{each.tokens_per_second:,.0f}" for each in (one.before, one.during, one.after))
            named = "-" if one.named_seconds is None else f"{one.named_seconds:.1f} s"
            memory = f"{one.before.hub_nbytes >> 20} / {one.during.hub_nbytes >> 20}"
            sent = f"{one.messages:,} messages, {one.nbytes / 1e6:,.0f} MB"
            begun = one.after.generations - one.before.generations
            lines.append(f"| {kind} | {one.ratio:.2f} | {rates} | {sent} | {memory} | {named} | {begun} |")
    ratios = {kind: [trial.ratio for trial in trials if trial.kind == kind] for kind in KINDS}
    lowest = min(ratios, key=lambda kind: statistics.median(ratios[kind]))
    lines += ["", f"Lowest median ratio: {statistics.median(ratios[lowest]):.2f} ({lowest}). "]
    lines += ["A flooder of a service is named once, so only the first trial of a kind can show when."]
    return lines


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        swarm = Swarm(Path(folder), stack)
        while len(steps_of(swarm.run)) < 5:
            if swarm.hub.process.poll() is not None:
                raise RuntimeError(swarm.hub.printed[-2000:])
            time.sleep(0.2)
        for repeat in range(given.repeats):
            for kind in KINDS if repeat % 2 == 0 else reversed(KINDS):
                trials.append(swarm.flood(kind, given.seconds))
                print(trials[-1], f"ratio {trials[-1].ratio:.2f}", flush=True)
        said = [line for line in swarm.hub.printed.splitlines() if "floods the hub" in line or "own server" in line]
    command = (
        f"python -m benchmarks.flood --output {given.output} --seconds {given.seconds:g} --repeats {given.repeats}"
    )
    lines = [
        *page(trials, given.seconds, command),
        "",
        "Lines on the owner's console:",
        "",
        *(f"    {one}" for one in said),
    ]
    given.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    given.output.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(trials)) + b"\n")


if __name__ == "__main__":
    main()
