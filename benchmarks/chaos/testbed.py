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
from benchmarks.chaos.attacks import order
from benchmarks.chaos.attacks.catalogue import ATTACKER
from benchmarks.chaos.config import HUB, ChaosConfig
from benchmarks.chaos.networks import Networks
from benchmarks.chaos.outages import newest_members
from benchmarks.chaos.processes import Program, descendants
from benchmarks.chaos.workload import hub_config, make_tokens
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import DECODE_ERRORS, UserError
from thinpipe.core.events import AnyEvent
from thinpipe.core.files import write_atomically
from thinpipe.core.log_tail import Tail

_LOCAL = "127.0.0.1"
_START_SECONDS, _LOOK_SECONDS = 120.0, 0.1
_DEVICE = ("--device", "cpu", "--reconnect-timeout-seconds", 600)
_EVENTS: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
REFUSED_EXIT_CODE = 2
"""Exit code of a command that a `UserError` ended: a hub that is refused its folder, a peer that is refused."""
_ATTACKER_INVITES = 60
"""One for each time that its key is taken from the hostile member, and the last for nobody."""
_STRUCK_OFF = "struck-off"
_INVITE = re.compile(r"^thinpipe\d+:\S+", re.MULTILINE)


class Testbed:
    """A context manager: who is in it when it ends is killed. Folders stay, and another bed goes on from them."""

    def __init__(self, config: ChaosConfig) -> None:
        self.config, self.folder = config, config.folder.absolute()
        self.dump_folder = self.folder / "run"
        self.networks = None if config.without_cuts else Networks(len(config.peers) + bool(config.attacks))
        self.attacker = ""
        """The present name of the hostile member; empty if there is none, or if it has used up its invites."""
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
        further = _ATTACKER_INVITES if self.config.attacks and not self._further_invites.exists() else 0
        hub = self.start_hub(invites=len(newcomers) + further)
        deadline = time.monotonic() + _START_SECONDS
        while len(_INVITE.findall(hub.printed)) < len(newcomers) + further:
            if not hub.running or time.monotonic() > deadline:
                raise UserError(f"the hub did not start: {hub.tail}")
            time.sleep(_LOOK_SECONDS)
        found = _INVITE.findall(hub.printed)
        if further:
            write_atomically(self._further_invites, "\n".join(found[len(newcomers) :]).encode())
        invites = dict(zip(newcomers, found, strict=False))
        for peer in self.config.peers:
            self.start_peer(peer, invites.get(peer))
        if self.config.attacks:
            self.start_attacker()

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
        words += _DEVICE
        prefix = [] if self.networks is None else self.networks.prefix(1 + self.index(peer))
        self.programs[peer] = Program(
            self.printed(peer),
            chaos_poison.__name__,
            words,
            prefix=prefix,
            environment={chaos_poison.LOG: str(self.config.poison_log(peer).absolute())},
        )
        return self.programs[peer]

    def start_attacker(self) -> None:
        """The hostile member, with the key that it has; if that was taken from it, with a new name and a new invite."""
        names = [f"{ATTACKER}{number or ''}" for number in range(_ATTACKER_INVITES - 1)]
        struck_off = [name for name in names if self._struck_off(name)]
        if len(struck_off) == len(names):  # what it could not do is missing in the verdict
            self.attacker = ""
            return
        self.config.attack_order.unlink(missing_ok=True)
        self.attacker, invite = names[len(struck_off)], self._further_invites.read_text().split()[len(struck_off)]
        home, config = self.home(self.attacker), self.config
        known, newcomer = ["join", home], ["join", invite, "--folder", home, "--name", self.attacker]
        self.programs[self.attacker] = Program(
            self.printed(self.attacker),
            "benchmarks.chaos.attacks.member",
            [*(known if self._belongs(self.attacker) else newcomer), *_DEVICE],
            prefix=[] if self.networks is None else self.networks.prefix(1 + len(config.peers)),
            environment={
                order.ORDER: str(config.attack_order.absolute()),
                order.DEEDS: str(config.attack_deeds.absolute()),
            },
        )

    def strike_off(self, name: str) -> None:
        """Its key opens nothing any more."""
        self.home(name).mkdir(parents=True, exist_ok=True)
        (self.home(name) / _STRUCK_OFF).touch()

    def _struck_off(self, name: str) -> bool:
        return (self.home(name) / _STRUCK_OFF).exists()

    @property
    def _further_invites(self) -> Path:
        return self.folder / "further-invites.txt"

    @property
    def unused_invite(self) -> str:
        """One that nobody will ever use."""
        return self._further_invites.read_text().split()[-1]

    def start_again(self, name: str) -> str:
        """One who has ended: the hub, or a peer with the folder it has. Returns what there is to say."""
        if self.programs[name].running:
            return "runs already"
        if name == HUB:
            self.start_hub()
        elif name == self.attacker:
            if self.programs[name].process.returncode == REFUSED_EXIT_CODE:
                self.strike_off(name)
            self.start_attacker()
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
        events = []
        for line in self._events.lines():
            with contextlib.suppress(*DECODE_ERRORS):
                events.append(_EVENTS.decode(line))
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
