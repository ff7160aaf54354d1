"""The broker of a run: one nats-server process on one folder, and the keys that may connect to it.

The folder holds the hub's signing keys, its certificate and the register of members; a broker restarted on it is the
same broker. Who joins or is invited gets a JWT that the server checks by itself; only a revocation goes
to the server, as a new JWT of the account. Methods block for a bounded time (use `asyncio.to_thread` from an event
loop) and may be called from any thread.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from types import MappingProxyType, TracebackType
from typing import Self

from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.files import remove_partial_files, write_atomically
from thinpipe.core.folder_lock import FolderLock
from thinpipe.swarm.broker.authority import Authority, AuthoritySeeds
from thinpipe.swarm.broker.certificate import Certificate, load_or_create_certificate
from thinpipe.swarm.broker.config import BrokerConfig, Limits, render
from thinpipe.swarm.broker.register import IssuedInvite, Member, Register
from thinpipe.swarm.broker.server import Server, find_server, free_port, push_account, refuse_absent_address
from thinpipe.swarm.protocol.invite import GRACE_SECONDS, Invite
from thinpipe.swarm.protocol.jwt import is_jwt_signed_by, signature_of
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.swarm.protocol.names import HUB
from thinpipe.transport.nats.client import Credentials
from thinpipe.transport.nats.connection import Address


@dataclass(frozen=True, kw_only=True)
class BrokerState:
    """Persistent state of a broker, stored in `broker.toml`."""

    port: int
    """TCP port; stays the same, because peers reconnect to it after a restart."""
    seeds: AuthoritySeeds


def load_broker_state(path: Path) -> BrokerState | None:
    """The state in this file; None if there is none. Raises UserError if it is of an earlier thinpipe."""
    if not path.exists():
        return None
    if "hub_seed" in path.read_text(encoding="utf-8"):
        raise UserError(
            f"{path} is of an earlier thinpipe, whose keys no longer open anything: delete this file, start the hub "
            "again and send everybody a new invite, to be used in a new folder. The run and its checkpoints stay"
        )
    return load_toml(path, BrokerState)


def save_broker_state(path: Path, state: BrokerState) -> None:
    write_atomically(path, dump_toml(state).encode(), mode=0o600)


_LOG = logging.getLogger(__name__)
_START_SECONDS = 120.0
"""Seconds for the server to start."""
_PORT_ATTEMPTS = 3
"""Number of ports to try when no port was requested."""


class BrokerError(Exception):
    """The server did not do what it was asked; the message ends with the tail of its log."""


class Broker:
    """Context manager that runs the server. `port` 0: the port of the last run, or any free one. `clock`: seconds since
    1970."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
        executable: Path | None = None,
        clock: Callable[[], float] = time,
    ) -> None:
        self.folder, self.clock = folder.absolute(), clock
        self._host, self._requested_port = host, port
        self._limits, self._executable = limits or Limits(), executable
        self._change_lock = threading.Lock()
        self._owes_revocations = False

    _lock: FolderLock
    _server: Server
    _certificate: Certificate
    _state: BrokerState
    _register: Register
    authority: Authority
    """Issues JWTs."""

    def __enter__(self) -> Self:
        refuse_absent_address(self._host)
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
            self.authority = Authority(self._state.seeds, lambda: self.clock())
            self._register = Register(self.folder / "members.json")
            self._admin = self.authority.admin_credentials()
            self._hub = self.authority.hub_credentials()
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
    def hub_credentials(self) -> Credentials:
        """Of the hub, which may use every subject."""
        return self._hub

    @property
    def admin_credentials(self) -> Credentials:
        """For the server's system account, where connects and disconnects are published."""
        return self._admin

    @property
    def peers(self) -> Mapping[str, str]:
        """Public keys by peer name."""
        return MappingProxyType(self._register.peers)

    @property
    def members(self) -> Mapping[str, Member]:
        return MappingProxyType(self._register.members)

    @property
    def invites(self) -> Mapping[str, IssuedInvite]:
        """Invites that were not revoked, used ones among them, by id."""
        return MappingProxyType(self._register.invites)

    def name_of(self, public_key: str) -> str | None:
        """Name of the peer with this key."""
        return self._register.name_of(public_key)

    def may_join(self, public_key: str) -> bool:
        """False for a key that was revoked, or that is the hub's own or an invite's: it could not be revoked alone."""
        own = {KeyPair.from_seed(each.seed).public_key for each in (self._hub, self._admin)}
        invites = (each.public_key for each in self.invites.values())
        return public_key not in own and public_key not in self._register.revoked and public_key not in invites

    @property
    def running(self) -> bool:
        return self._server.running

    @property
    def server_pid(self) -> int:
        """Process id of nats-server. Raises ProcessLookupError when it is gone."""
        return self._server.pid

    def log_tail(self) -> str:
        return self._server.log_tail()

    def restart(self) -> None:
        """Starts a server that has ended, on the same port and with all that is on disk. Raises UserError if it ends
        again while it starts."""
        with self._change_lock:
            self._server.stop()
            self._requested_port = self._state.port  # peers dial this one
            self._start(find_server(self._executable))
            self._owes_revocations = False

    def add_peer(self, name: str, public_key: str, *, invite: str = "") -> None:
        """Enters a peer, and that it has used this invite, in one change that is on disk when this returns."""
        with self._change_lock:
            self._register.add_member(name, Member(public_key=public_key, invite=invite, joined_s=self.clock()))

    def remove_peer(self, name: str) -> None:
        """Revokes the peer's key: its connections are cut at once and new ones refused."""
        with self._change_lock:
            self._register.remove_member(name)
            self._owes_revocations = True
            self._push_revocations()

    def add_invite(self, *, url: str, run: str, seconds: float, for_name: str = "") -> Invite:
        """A new invite to the run of this name at this URL, which ends after this many seconds. `for_name`: name that
        the newcomer gets."""
        pair, identity, authority = KeyPair.new(), f"i{secrets.token_hex(6)}", self.authority
        with self._change_lock:
            now = self.clock()
            expires = int(now + seconds)
            issued = IssuedInvite(public_key=pair.public_key, expires_s=expires, for_name=for_name)
            self._register.add_invite(identity, issued, now)
        return Invite(
            url=url,
            run=run,
            fingerprint=self.fingerprint,
            id=identity,
            seed=pair.seed,
            account=authority.account,
            issuer=authority.invite_issuer,
            expires=expires,
            signature=signature_of(authority.invite_jwt(identity, pair.public_key, expires + GRACE_SECONDS)),
        )

    def revoke_invite(self, invite: str) -> None:
        with self._change_lock:
            self._register.revoke_invite(invite)
            self._owes_revocations = True
            self._push_revocations()

    def catch_up(self) -> None:
        """Gives the server the revocations that it could not be given before, if there are any. Raises BrokerError."""
        with self._change_lock:
            if self._owes_revocations:
                self._push_revocations()

    def _push_revocations(self) -> None:
        """Gives the server the account's JWT with all revocations, which are on disk already. Raises BrokerError."""
        jwt = self.authority.account_jwt(self._register.revoked)
        if not is_jwt_signed_by(jwt, self.authority.operator):  # no server must ever get a JWT that locks everybody out
            raise BrokerError("the hub's signature of its own account is wrong: nothing was changed at the server")
        try:
            refusal = push_account(self.url, self.fingerprint, self._admin, self.authority.account, jwt)
        except ConnectionError as error:
            raise BrokerError(
                f"the key is revoked, but nats-server could not be asked: {error}. It is asked again when the hub is "
                f"connected to it again. The end of the server's log:\n{self.log_tail()}"
            ) from error
        if refusal is not None:
            raise BrokerError(
                f"the key is revoked, but nats-server refuses to take note: {refusal}. Restart the hub\n"
                f"{self.log_tail()}"
            )
        self._owes_revocations = False

    def _write_config(self) -> None:
        """Writes state and server configuration."""
        text = render(self._config())
        save_broker_state(self.folder / "broker.toml", self._state)
        write_atomically(self.folder / "server.conf", text.encode(), mode=0o600)

    def _start(self, executable: Path) -> None:
        """Starts the server. If another process takes an automatically chosen port first, tries another port."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self._write_config()
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
                if taken and self._requested_port:
                    raise UserError(
                        f"port {self._requested_port} is taken by another program: stop that one, or choose another "
                        "--hub.port"
                    ) from None
                if not taken or attempt == _PORT_ATTEMPTS:
                    raise
            before, self._state = self._state.port, replace(self._state, port=free_port(self._host))
            _LOG.warning(
                "port %d is taken: the hub listens on %d now, where earlier invites and joined machines do not look "
                "for it. Set --hub.port, and let everybody join with a new invite",
                before,
                self._state.port,
            )

    def _load_or_create_state(self) -> BrokerState:
        known = load_broker_state(self.folder / "broker.toml")
        if known is not None:
            return replace(known, port=self._requested_port or known.port)
        return BrokerState(port=self._requested_port or free_port(self._host), seeds=AuthoritySeeds.new())

    def _config(self) -> BrokerConfig:
        authority = self.authority
        return BrokerConfig(
            host=self._host,
            port=self._state.port,
            certificate=self._certificate.path,
            private_key=self._certificate.key_path,
            log=self.folder / "server.log",
            operator_jwt=authority.operator_jwt(),
            account=authority.account,
            account_jwt=authority.account_jwt(self._register.revoked),
            system_account=authority.system_account,
            system_jwt=authority.system_jwt(),
            limits=self._limits,
        )

    @property
    def _local_address(self) -> tuple[str, int]:
        """Address at which this machine reaches the server."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host), self._state.port


def hub_address(folder: Path) -> Address | None:
    """Address and hub key of the broker of this folder, for its owner on this machine; None if it has no broker."""
    known = load_broker_state(folder / "broker.toml")
    if known is None:
        return None
    return Address(
        url=f"tls://127.0.0.1:{known.port}",
        fingerprint=load_or_create_certificate(folder).fingerprint,
        name=HUB,
        credentials=Authority(known.seeds).hub_credentials(),
    )
