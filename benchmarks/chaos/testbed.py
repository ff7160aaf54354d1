"""The test bed of a chaos run: a hub and peers as real programs, which can be started, ended and started again."""

import contextlib
import re
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import psutil  # type: ignore[import-untyped]

from benchmarks.chaos import poison as chaos_poison
from benchmarks.chaos import small_disks as chaos_disk
from benchmarks.chaos.config import HUB, ChaosConfig
from benchmarks.chaos.networks import Networks
from benchmarks.chaos.outages import newest_members
from benchmarks.chaos.processes import Program, descendants
from benchmarks.chaos.workload import hub_config, make_tokens
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent
from thinpipe.core.log_tail import Tail
from thinpipe.swarm.protocol.decoding import decode_or_none

_LOCAL = "127.0.0.1"
_START_SECONDS, _LOOK_SECONDS = 120.0, 0.1
_RECONNECT_TIMEOUT_SECONDS = 600
_EVENTS: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_INVITE = re.compile(r"thinpipe2:\S+")


class Testbed:
    """A context manager: who is in it when it ends is killed. Folders stay, and another bed goes on from them."""

    def __init__(self, config: ChaosConfig) -> None:
        self.config, self.folder = config, config.folder.absolute()
        self.dump_folder = self.folder / "run"
        self.networks = None if config.without_cuts else Networks(len(config.peers))
        self.programs: dict[str, Program] = {}
        """By name: `hub`, and the peers. Those that ended are in it too, until they are started again."""
        self.others: list[Program] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if self.networks is not None:
                stack.enter_context(self.networks)
            if "disk" in self.config.kinds:
                for folder in (self.dump_folder, *map(self.home, self.config.peers)):
                    chaos_disk.mount(folder)
                    chaos_disk.empty(folder)
                    stack.callback(chaos_disk.unmount, folder)
            stack.callback(self.end_all)
            self._prepare()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        make_tokens(self.config)
        address = _LOCAL if self.networks is None else self.networks.address(0)
        (self.folder / "run.toml").write_text(dump_toml(hub_config(self.config, self.dump_folder, address)))

    def start(self) -> None:
        """The hub, then everybody: with an invite, or with the folder they have."""
        newcomers = [peer for peer in self.config.peers if not self._belongs(peer)]
        hub = self.start_hub(invites=len(newcomers))
        deadline = time.monotonic() + _START_SECONDS
        while len(_INVITE.findall(hub.printed)) < len(newcomers):
            if not hub.running or time.monotonic() > deadline:
                raise UserError(f"the hub did not start: {hub.tail}")
            time.sleep(_LOOK_SECONDS)
        invites = dict(zip(newcomers, _INVITE.findall(hub.printed), strict=True))
        for peer in self.config.peers:
            self.start_peer(peer, invites.get(peer))

    def start_hub(self, *, invites: int = 0) -> Program:
        self._events = Tail(self.dump_folder / "events.jsonl")
        self._members: list[str] = []
        self.programs[HUB] = self._hub_program(HUB, "--hub.invites", invites)
        return self.programs[HUB]

    def start_second_hub(self) -> Program:
        """On the folder that the first one has: it must be refused."""
        self.others.append(self._hub_program("second-hub"))
        return self.others[-1]

    def _hub_program(self, name: str, *arguments: object) -> Program:
        prefix = [] if self.networks is None else self.networks.prefix(0)
        words = ["hub", self.folder / "run.toml", *arguments]
        return Program(self.printed(name), "thinpipe", words, prefix=prefix)

    def start_peer(self, peer: str, invite: str | None = None) -> Program:
        home = self.home(peer)
        words: list[object] = ["join", home] if invite is None else ["join", invite, "--folder", home, "--name", peer]
        words += ["--device", "cpu", "--reconnect-timeout-seconds", _RECONNECT_TIMEOUT_SECONDS]
        prefix = [] if self.networks is None else self.networks.prefix(1 + self.index(peer))
        self.programs[peer] = Program(
            self.printed(peer),
            chaos_poison.__name__,
            words,
            prefix=prefix,
            environment={chaos_poison.LOG: str(self.config.poison_log(peer).absolute())},
        )
        return self.programs[peer]

    def start_again(self, name: str) -> str:
        """One who has ended: the hub, or a peer with the folder it has. Returns what there is to say."""
        if self.programs[name].running:
            return "runs already"
        if name == HUB:
            self.start_hub()
        else:
            self.start_peer(name)
        return ""

    def _belongs(self, peer: str) -> bool:
        return (self.home(peer) / "identity.toml").exists()

    def home(self, peer: str) -> Path:
        return self.folder / "peers" / peer

    def printed(self, name: str) -> Path:
        return self.folder / "printed" / f"{name}.out"

    def members(self) -> list[str]:
        """Peers of the newest generation that this start of the hub has begun; none before the first one."""
        events = [event for line in self._events.lines() if (event := decode_or_none(_EVENTS, line)) is not None]
        self._members = newest_members(events) or self._members
        return self._members

    def index(self, peer: str) -> int:
        return self.config.peers.index(peer)

    def pids(self) -> dict[str, int]:
        """Of everybody who runs, the hub's server included."""
        found = {name: program.pid for name, program in self.programs.items() if program.running}
        if HUB in found:
            found |= {"server": child.pid for child in descendants(found[HUB]) if _is_server(child)}  # noqa: B035  one
        return found

    def end_all(self) -> None:
        """SIGKILL for everybody."""
        for program in (*self.programs.values(), *self.others):
            program.kill(with_children=True)


def _is_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.name().startswith("nats-server"))
    return False
