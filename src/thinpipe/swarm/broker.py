"""The broker of a run: one nats-server on one folder, and who may speak to it.

The folder keeps keys, certificate, members and JetStream's data: a broker that is started there again is the same one.
Methods block, each for a bounded time (call them with `asyncio.to_thread` from a loop), and may come from any thread.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from thinpipe.core.errors import UserError
from thinpipe.core.files import remove_partial_files, write_atomically
from thinpipe.swarm.broker_config import HUB, BrokerConfig, Limits, render
from thinpipe.swarm.certificate import Certificate, certificate_in
from thinpipe.swarm.keys import KeyPair
from thinpipe.swarm.lock import FolderLock
from thinpipe.swarm.members import Members, load_members, save_members
from thinpipe.swarm.reload import ask_to_reload
from thinpipe.swarm.server import Server, find_server, free_port
from thinpipe.transport.nats.post import Address

_START_SECONDS = 120.0
"""Enough to look through a store of many gigabytes, which comes before the server answers."""
_PORTS_TRIED = 3


class BrokerError(Exception):
    """The server did not do what it was asked; the message ends with its log."""


class Broker:
    """A context manager. `port` 0: the one of last time, or any free one."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
        executable: Path | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self._host, self._wanted_port = host, port
        self._limits, self._executable = limits or Limits(), executable
        self._changing = threading.Lock()

    _lock: FolderLock
    _server: Server
    _certificate: Certificate
    _members: Members

    def __enter__(self) -> Self:
        executable = find_server(self._executable)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._lock = FolderLock(self.folder)
        except OSError as error:  # a store that two servers write to is lost, so a hub needs it
            text = f"{self.folder} cannot be locked ({error.strerror}): choose a folder on another file system"
            raise UserError(text) from None
        try:
            remove_partial_files(self.folder)
            self._certificate = certificate_in(self.folder)
            self._members = self._remembered()
            self._start(executable)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._server.stop()
        finally:
            self._lock.release()

    @property
    def url(self) -> str:
        """For programs on this machine; others need an address of it that they can reach."""
        host, port = self._local_address
        return f"tls://[{host}]:{port}" if ":" in host else f"tls://{host}:{port}"

    @property
    def port(self) -> int:
        return self._members.port

    @property
    def fingerprint(self) -> str:
        return self._certificate.fingerprint

    @property
    def hub_seed(self) -> str:
        """The key of the hub, which may use every subject and JetStream."""
        return self._members.hub_seed

    @property
    def admin_seed(self) -> str:
        """The key for the server's own account, where it tells who came and went."""
        return self._members.admin_seed

    @property
    def peers(self) -> Mapping[str, str]:
        return dict(self._members.peers)

    @property
    def invites(self) -> Mapping[str, str]:
        return dict(self._members.invites)

    def knows(self, public_key: str) -> bool:
        """Whether somebody has this key already."""
        members = self._members
        own = (KeyPair.from_seed(seed).public_key for seed in (members.hub_seed, members.admin_seed))
        return public_key in (*members.peers.values(), *members.invites.values(), *own)

    @property
    def running(self) -> bool:
        return self._server.running

    @property
    def server_pid(self) -> int:
        return self._server.pid

    def log_tail(self) -> str:
        return self._server.log_tail()

    def add_peer(self, name: str, public_key: str) -> None:
        self._change(add_peers={name: public_key})

    def remove_peer(self, name: str) -> None:
        """Cuts its connections at once and refuses new ones."""
        self._change(remove_peers=(name,))

    def add_invite(self, invite: str, public_key: str) -> None:
        self._change(add_invites={invite: public_key})

    def remove_invite(self, invite: str) -> None:
        self._change(remove_invites=(invite,))

    def admit(self, invite: str, name: str, public_key: str) -> None:
        """Turns an invite into a peer, in one step: no crash can leave both, or neither."""
        self._change(add_peers={name: public_key}, remove_invites=(invite,))

    def _change(
        self,
        *,
        add_peers: Mapping[str, str] | None = None,
        remove_peers: tuple[str, ...] = (),
        add_invites: Mapping[str, str] | None = None,
        remove_invites: tuple[str, ...] = (),
    ) -> None:
        with self._changing:
            before = self._members
            self._adopt(
                replace(
                    before,
                    peers=_changed("peer", before.peers, add_peers or {}, remove_peers),
                    invites=_changed("invite", before.invites, add_invites or {}, remove_invites),
                )
            )
            refusal = self._reload()
            if refusal is not None:
                self._adopt(before)
                raise BrokerError(f"nats-server refused its new settings: {refusal}\n{self.log_tail()}")

    def _adopt(self, members: Members) -> None:
        """Writes what the server shall read. Whatever is not acceptable raises before anything is written."""
        text = render(self._config(members))
        save_members(self.folder / "members.toml", members)
        write_atomically(self.folder / "server.conf", text.encode(), mode=0o600)
        self._members = members

    def _reload(self) -> str | None:
        try:
            return ask_to_reload(self.url, self.fingerprint, self.admin_seed)
        except ConnectionError as error:
            raise BrokerError(
                f"the change is written, but nats-server could not be asked to read it: {error}. "
                f"Start the hub again, and it holds. The end of the server's log:\n{self.log_tail()}"
            ) from error

    def _start(self, executable: Path) -> None:
        """A port that we chose may be taken before the server has it: then another is chosen."""
        for attempt in range(1, _PORTS_TRIED + 1):
            self._adopt(self._members)
            self._server = Server(
                executable,
                self.folder / "server.conf",
                log=self.folder / "server.log",
                output=self.folder / "server.out",
                inherited=self._lock.inheritable,
            )
            try:
                self._server.wait_until_ready(self._local_address, self.fingerprint, seconds=_START_SECONDS)
                return
            except BaseException:
                self._server.stop()
                taken = "address already in use" in self.log_tail().lower()
                if self._wanted_port or not taken or attempt == _PORTS_TRIED:
                    raise
            self._members = replace(self._members, port=free_port(self._host))

    def _remembered(self) -> Members:
        known = load_members(self.folder / "members.toml")
        if known is not None:
            return replace(known, port=self._wanted_port or known.port)
        return Members(
            port=self._wanted_port or free_port(self._host),
            hub_seed=KeyPair.new().seed,
            admin_seed=KeyPair.new().seed,
        )

    def _config(self, members: Members) -> BrokerConfig:
        return BrokerConfig(
            host=self._host,
            port=members.port,
            certificate=self._certificate.path,
            private_key=self._certificate.key_path,
            store=self.folder / "jetstream",
            log=self.folder / "server.log",
            hub_key=KeyPair.from_seed(members.hub_seed).public_key,
            admin_key=KeyPair.from_seed(members.admin_seed).public_key,
            peers=members.peers,
            invites=members.invites,
            limits=self._limits,
        )

    @property
    def _local_address(self) -> tuple[str, int]:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host), self._members.port


def _changed(kind: str, known: Mapping[str, str], added: Mapping[str, str], removed: tuple[str, ...]) -> dict[str, str]:
    for name in added:
        if name in known:
            raise UserError(f"there is a {kind} {name} already: choose another name, or remove that one first")
    for name in removed:
        if name not in known:
            raise UserError(f"there is no {kind} {name[:80]!r}; there are: {', '.join(known) or 'none'}")
    return {name: key for name, key in {**known, **added}.items() if name not in removed}


def hub_address(folder: Path) -> Address | None:
    """Of the broker of this folder, for its owner on this machine; None if there never was one."""
    known = load_members(folder / "members.toml")
    if known is None:
        return None
    return Address(
        url=f"tls://127.0.0.1:{known.port}",
        fingerprint=certificate_in(folder).fingerprint,
        name=HUB,
        seed=known.hub_seed,
    )
