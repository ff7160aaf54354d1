"""The broker of a run: one nats-server process on one folder, and the keys that may connect to it.

The folder holds keys, certificate, peers, invites and JetStream data; a broker restarted on it is the same broker.
Methods block for a bounded time (use `asyncio.to_thread` from an event loop) and may be called from any thread.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.files import remove_partial_files, write_atomically
from thinpipe.core.folder_lock import FolderLock
from thinpipe.swarm.broker.certificate import Certificate, load_or_create_certificate
from thinpipe.swarm.broker.config import BrokerConfig, Limits, render
from thinpipe.swarm.broker.server import Server, ask_to_reload, find_server, free_port
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.swarm.protocol.names import HUB
from thinpipe.transport.nats.connection import Address


@dataclass(frozen=True, kw_only=True)
class BrokerState:
    """Persistent state of a broker, stored in `broker.toml`."""

    port: int
    """TCP port; stays the same, because peers reconnect to it after a restart."""
    hub_seed: str = field(repr=False)
    """Seed of the hub's key."""
    admin_seed: str = field(repr=False)
    """Seed of the key for the server's system account."""
    peers: dict[str, str] = field(default_factory=dict)
    """Public keys by peer name."""
    invites: dict[str, str] = field(default_factory=dict)
    """Public keys by invite id."""


def load_broker_state(path: Path) -> BrokerState | None:
    return load_toml(path, BrokerState) if path.exists() else None


def save_broker_state(path: Path, state: BrokerState) -> None:
    write_atomically(path, dump_toml(state).encode(), mode=0o600)


_START_SECONDS = 120.0
"""Seconds for the server to start; enough to scan a JetStream store of many gigabytes before the server answers."""
_PORT_ATTEMPTS = 3
"""Number of ports to try when no port was requested."""


class BrokerError(Exception):
    """The server did not do what it was asked; the message ends with the tail of its log."""


class Broker:
    """Context manager that runs the server. `port` 0: the port of the last run, or any free one."""

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
        self._host, self._requested_port = host, port
        self._limits, self._executable = limits or Limits(), executable
        self._change_lock = threading.Lock()

    _lock: FolderLock
    _server: Server
    _certificate: Certificate
    _state: BrokerState

    def __enter__(self) -> Self:
        executable = find_server(self._executable)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._lock = FolderLock(self.folder)
        except OSError as error:  # required: two servers writing to one store would corrupt it
            text = f"{self.folder} cannot be locked ({error.strerror}): choose a folder on another file system"
            raise UserError(text) from None
        try:
            remove_partial_files(self.folder)
            self._certificate = load_or_create_certificate(self.folder)
            self._state = self._load_or_create_state()
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
        """URL for processes on this machine; others need an address that they can reach."""
        host, port = self._local_address
        return f"tls://[{host}]:{port}" if ":" in host else f"tls://{host}:{port}"

    @property
    def port(self) -> int:
        return self._state.port

    @property
    def fingerprint(self) -> str:
        return self._certificate.fingerprint

    @property
    def hub_seed(self) -> str:
        """Seed of the hub's key, which may use every subject and JetStream."""
        return self._state.hub_seed

    @property
    def admin_seed(self) -> str:
        """Seed of the key for the server's system account, where connects and disconnects are published."""
        return self._state.admin_seed

    @property
    def peers(self) -> Mapping[str, str]:
        """Public keys by peer name."""
        return dict(self._state.peers)

    @property
    def invites(self) -> Mapping[str, str]:
        """Public keys by invite id."""
        return dict(self._state.invites)

    def has_key(self, public_key: str) -> bool:
        """True if the key is already in use."""
        state = self._state
        own = (KeyPair.from_seed(seed).public_key for seed in (state.hub_seed, state.admin_seed))
        return public_key in (*state.peers.values(), *state.invites.values(), *own)

    @property
    def running(self) -> bool:
        return self._server.running

    @property
    def server_pid(self) -> int:
        """Process id of nats-server. Raises ProcessLookupError when it is gone."""
        return self._server.pid

    def log_tail(self) -> str:
        return self._server.log_tail()

    def add_peer(self, name: str, public_key: str) -> None:
        self._change(add_peers={name: public_key})

    def remove_peer(self, name: str) -> None:
        """Removes the peer's key: its connections are closed at once and new ones refused."""
        self._change(remove_peers=(name,))

    def add_invite(self, invite: str, public_key: str) -> None:
        self._change(add_invites={invite: public_key})

    def remove_invite(self, invite: str) -> None:
        self._change(remove_invites=(invite,))

    def admit(self, invite: str, name: str, public_key: str) -> None:
        """Turns an invite into a peer atomically: a crash leaves one of the two, never both or neither."""
        self._change(add_peers={name: public_key}, remove_invites=(invite,))

    def _change(
        self,
        *,
        add_peers: Mapping[str, str] | None = None,
        remove_peers: tuple[str, ...] = (),
        add_invites: Mapping[str, str] | None = None,
        remove_invites: tuple[str, ...] = (),
    ) -> None:
        """Applies a change of peers or invites and reloads the server; undoes the change if the server refuses it.
        Raises BrokerError."""
        with self._change_lock:
            before = self._state
            self._apply(
                replace(
                    before,
                    peers=_updated("peer", before.peers, add_peers or {}, remove_peers),
                    invites=_updated("invite", before.invites, add_invites or {}, remove_invites),
                )
            )
            refusal = self._reload()
            if refusal is not None:
                self._apply(before)
                raise BrokerError(f"nats-server rejected its new configuration: {refusal}\n{self.log_tail()}")

    def _apply(self, state: BrokerState) -> None:
        """Writes state and server configuration. Raises before anything is written if the state is invalid."""
        text = render(self._config(state))
        save_broker_state(self.folder / "broker.toml", state)
        write_atomically(self.folder / "server.conf", text.encode(), mode=0o600)
        self._state = state

    def _reload(self) -> str | None:
        """Reloads the server's configuration; returns the reason if the server refuses it, else None."""
        try:
            return ask_to_reload(self.url, self.fingerprint, self.admin_seed)
        except ConnectionError as error:
            raise BrokerError(
                f"the change is stored, but nats-server could not be asked to reload its configuration: {error}. "
                f"Restart the hub to apply the change. The end of the server's log:\n{self.log_tail()}"
            ) from error

    def _start(self, executable: Path) -> None:
        """Starts the server. If another process takes an automatically chosen port first, tries another port."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self._apply(self._state)
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
                if self._requested_port or not taken or attempt == _PORT_ATTEMPTS:
                    raise
            self._state = replace(self._state, port=free_port(self._host))

    def _load_or_create_state(self) -> BrokerState:
        known = load_broker_state(self.folder / "broker.toml")
        if known is not None:
            return replace(known, port=self._requested_port or known.port)
        return BrokerState(
            port=self._requested_port or free_port(self._host),
            hub_seed=KeyPair.new().seed,
            admin_seed=KeyPair.new().seed,
        )

    def _config(self, state: BrokerState) -> BrokerConfig:
        return BrokerConfig(
            host=self._host,
            port=state.port,
            certificate=self._certificate.path,
            private_key=self._certificate.key_path,
            store=self.folder / "jetstream",
            log=self.folder / "server.log",
            hub_key=KeyPair.from_seed(state.hub_seed).public_key,
            admin_key=KeyPair.from_seed(state.admin_seed).public_key,
            peers=state.peers,
            invites=state.invites,
            limits=self._limits,
        )

    @property
    def _local_address(self) -> tuple[str, int]:
        """Address at which this machine reaches the server."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host), self._state.port


def _updated(kind: str, known: Mapping[str, str], added: Mapping[str, str], removed: tuple[str, ...]) -> dict[str, str]:
    """The mapping with entries added and removed. Raises UserError for a duplicate or unknown name."""
    for name in added:
        if name in known:
            raise UserError(f"there is already a {kind} {name}: choose another name, or remove the {kind} first")
    for name in removed:
        if name not in known:
            raise UserError(f"there is no {kind} {name[:80]!r}; known: {', '.join(known) or 'none'}")
    return {name: key for name, key in {**known, **added}.items() if name not in removed}


def hub_address(folder: Path) -> Address | None:
    """Address and hub key of the broker of this folder, for its owner on this machine; None if it has no broker."""
    known = load_broker_state(folder / "broker.toml")
    if known is None:
        return None
    return Address(
        url=f"tls://127.0.0.1:{known.port}",
        fingerprint=load_or_create_certificate(folder).fingerprint,
        name=HUB,
        seed=known.hub_seed,
    )
