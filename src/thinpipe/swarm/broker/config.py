"""Renders the configuration of nats-server. Pure: reads and writes no files.

Names and keys come from untrusted peers; each is checked against a narrow pattern, so none can inject a line, a user or
a subject. A peer publishes only under its own name (`m.<to>.<from>.<kind>`: permissions fix <from>) and subscribes only
to broadcasts and to messages for itself. Only the hub may use JetStream: its replies go to any subject that the
requester names, which would let a peer publish as another.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.swarm.protocol.keys import is_public_key
from thinpipe.swarm.protocol.names import HUB, check_name

_HOST = re.compile(r"[A-Za-z0-9.:-]{1,255}", re.ASCII)
_SERVER_SUBJECTS = ("$JS.>", "$KV.>", "$O.>", "$SYS.>")
"""Subjects of the server itself. Peers are not allowed to use them anyway; the explicit deny overrides any later
allow."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of nats-server."""

    payload_nbytes: int = 8 << 20
    """Maximum size of one message in bytes, header included. nats-server advises against more."""
    pending_nbytes: int = 256 << 20
    """Maximum bytes queued for one connection; beyond it the server closes the connection and drops the queue."""
    store_nbytes: int = 20 << 30
    """Maximum bytes of JetStream data on disk."""
    connections: int = 8192
    """Maximum number of connections."""
    write_deadline_seconds: int = 60
    """Seconds without progress in writing to a socket after which the server closes the connection. Longer than any
    pause that a run should survive: heartbeats decide when a peer is lost."""
    ping_interval_seconds: int = 15
    """Seconds between two pings of the server to a connection."""
    unanswered_pings: int = 3
    """Number of unanswered pings after which the server closes the connection."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if type(value) is not int or value < 1:
                raise UserError(f"{limit.name} is {value!r}: use a whole number above 0")
        if self.payload_nbytes > self.pending_nbytes:
            raise UserError("pending_nbytes must be at least payload_nbytes, the size of the largest message")


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """All inputs of the server's configuration; validated on creation."""

    host: str
    """Address to listen on; 0.0.0.0: all interfaces."""
    port: int
    certificate: Path
    private_key: Path
    store: Path
    """Folder of JetStream data."""
    log: Path
    """Log file of the server."""
    hub_key: str
    """Public key of the hub."""
    admin_key: str
    """Public key for the system account, which may reload the configuration and sees connects and disconnects."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Public keys by peer name."""
    invites: Mapping[str, str] = field(default_factory=dict)
    """Public keys by invite id. An invite's key may only publish on `join.<id>` and receive replies."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise UserError(
                f"{self.host!r} is not an address to listen on: use an address such as 0.0.0.0 or 127.0.0.1"
            )
        if type(self.port) is not int or not 0 < self.port < 65536:
            raise UserError(f"{self.port!r} is not a port: use a number from 1 to 65535")
        for name in (*self.peers, *self.invites):
            check_name(name)
        both = self.peers.keys() & self.invites.keys()
        if both:
            # They would share an inbox: the holder of the invite could read the peer's replies.
            raise UserError(f"{min(both)} is the name of a peer and of an invite: rename one of them")
        keys = (self.hub_key, self.admin_key, *self.peers.values(), *self.invites.values())
        for key in keys:
            if not is_public_key(key):
                raise UserError(f"{key[:80]!r} is not a user's public key (56 letters and digits that begin with U)")
        if len(set(keys)) < len(keys):
            raise UserError("two users have the same key: create a new key for one of them")


def render(config: BrokerConfig) -> str:
    """The text of the server's configuration file."""
    limits = config.limits
    peers = (_user(config.peers[name], *_peer_subjects(name)) for name in sorted(config.peers))
    invites = (_user(config.invites[name], *_invite_subjects(name)) for name in sorted(config.invites))
    return "\n".join(
        (
            f"host: {_quoted(config.host)}",
            f"port: {config.port}",
            f"max_payload: {limits.payload_nbytes}",
            f"max_pending: {limits.pending_nbytes}",
            f"max_connections: {limits.connections}",
            f'write_deadline: "{limits.write_deadline_seconds}s"',
            f'ping_interval: "{limits.ping_interval_seconds}s"',
            f"ping_max: {limits.unanswered_pings}",
            f"log_file: {_quoted(config.log)}",
            f"logfile_size_limit: {10 << 20}",  # every rejected connection is logged
            "logfile_max_num: 2",
            "authorization { timeout: 5 }",
            "tls {",
            f"  cert_file: {_quoted(config.certificate)}",
            f"  key_file: {_quoted(config.private_key)}",
            '  min_version: "1.3"',
            "  timeout: 5",
            "  handshake_first: true",
            "}",
            "jetstream {",
            f"  store_dir: {_quoted(config.store)}",
            f"  max_file_store: {limits.store_nbytes}",
            "  sync_interval: always",
            "}",
            "accounts {",
            f"  SYS {{ users: [ {{nkey: {config.admin_key}}} ] }}",
            "  APP {",
            "    jetstream: enabled",
            "    users: [",
            f"      {{nkey: {config.hub_key}}}",
            *peers,
            *invites,
            "    ]",
            "  }",
            "}",
            "system_account: SYS",
            "",
        )
    )


def _peer_subjects(name: str) -> tuple[list[str], list[str]]:
    """Subjects on which a peer may publish, and to which it may subscribe."""
    return [f"m.*.{name}.>", f"{HUB}.{name}.>"], [f"m.{name}.>", f"_INBOX.{name}.>", "bcast.>"]


def _invite_subjects(name: str) -> tuple[list[str], list[str]]:
    """Subjects on which an invite's key may publish, and to which it may subscribe."""
    return [f"join.{name}"], [f"_INBOX.{name}.>"]


def _user(key: str, publish: Iterable[str], subscribe: Iterable[str]) -> str:
    allowed = f"publish: {{allow: {_list(publish)}, deny: {_list(_SERVER_SUBJECTS)}}}, subscribe: {_list(subscribe)}"
    return f"      {{nkey: {key}, permissions: {{{allowed}}}}}"


def _list(subjects: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"


def _quoted(value: Path | str) -> str:
    text = value.as_posix() if isinstance(value, Path) else value
    if not text.isprintable():
        raise UserError(
            f"{text!r} has characters that the configuration of nats-server cannot contain: choose another folder"
        )
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
