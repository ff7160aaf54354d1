"""The text of nats-server's settings, as a pure function of what the hub wants. Nothing is read or written here.

Names and keys come from strangers. Each is checked against a narrow form, so none can add a line, a user or a subject.
A peer publishes only as itself (`m.<to>.<from>.<kind>`: the rule fixes <from>) and reads only its own mail. JetStream
is for the hub alone: its answers go to any subject the asker names, which would let a peer write as another.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.swarm.keys import is_public_key

HUB = "hub"
"""The hub's own name in subjects; no peer may have it."""
_NAME = re.compile(r"[a-z0-9]{1,32}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9.:-]{1,255}", re.ASCII)
_SERVICES = ("$JS.>", "$KV.>", "$O.>", "$SYS.>")
"""The server's own. Not among what a peer may use; denied by name as well, which beats whatever is allowed one day."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    payload_nbytes: int = 8 << 20
    """Of one message, its header included. The server advises against more."""
    pending_nbytes: int = 256 << 20
    """What may wait for one connection; beyond it the server cuts the connection and drops what waited."""
    store_nbytes: int = 20 << 30
    """What JetStream may keep on the disk."""
    connections: int = 8192
    write_deadline_seconds: int = 60
    """A connection whose socket takes nothing for so long is cut. Longer than any pause a run should survive: who is
    lost, and after how long, is for `hearts` to say."""
    ping_interval_seconds: int = 15
    unanswered_pings: int = 3

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if type(value) is not int or value < 1:
                raise UserError(f"{limit.name} is {value!r}: use a whole number above 0")
        if self.payload_nbytes > self.pending_nbytes:
            raise UserError("pending_nbytes must be at least payload_nbytes, or no such message could ever wait")


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    host: str
    """Where the server listens: an address of this machine; 0.0.0.0 for all."""
    port: int
    certificate: Path
    private_key: Path
    store: Path
    log: Path
    hub_key: str
    admin_key: str
    """Of the one who may ask the server to read its settings again, and hears who comes and goes."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Public keys by name."""
    invites: Mapping[str, str] = field(default_factory=dict)
    """Public keys by id. Who holds one may say `join.<id>` and hear the answer, nothing else."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise UserError(f"{self.host!r} is no address to listen at: use one like 0.0.0.0 or 127.0.0.1")
        if type(self.port) is not int or not 0 < self.port < 65536:
            raise UserError(f"{self.port!r} is no port: use a number from 1 to 65535")
        for name in (*self.peers, *self.invites):
            check_name(name)
        both = self.peers.keys() & self.invites.keys()
        if both:
            # They would share an inbox: the holder of the invite could read what the peer is answered.
            raise UserError(f"{min(both)} is a peer and an invite: give one of them another name")
        keys = (self.hub_key, self.admin_key, *self.peers.values(), *self.invites.values())
        for key in keys:
            if not is_public_key(key):
                raise UserError(f"{key[:80]!r} is not a user's public key, which is 56 letters and digits from U on")
        if len(set(keys)) < len(keys):
            raise UserError("two users have the same key: each needs its own, make a new one")


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == HUB:
        raise UserError(f"{name[:80]!r} cannot be a name: use 1 to 32 small letters a-z and digits, but not {HUB!r}")


def render(config: BrokerConfig) -> str:
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
            f"logfile_size_limit: {10 << 20}",  # every refused stranger is a line
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
    return [f"m.*.{name}.>", f"{HUB}.{name}.>"], [f"m.{name}.>", f"_INBOX.{name}.>", "bcast.>"]


def _invite_subjects(name: str) -> tuple[list[str], list[str]]:
    return [f"join.{name}"], [f"_INBOX.{name}.>"]


def _user(key: str, publish: Iterable[str], subscribe: Iterable[str]) -> str:
    allowed = f"publish: {{allow: {_list(publish)}, deny: {_list(_SERVICES)}}}, subscribe: {_list(subscribe)}"
    return f"      {{nkey: {key}, permissions: {{{allowed}}}}}"


def _list(subjects: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"


def _quoted(value: Path | str) -> str:
    text = value.as_posix() if isinstance(value, Path) else value
    if not text.isprintable():
        raise UserError(f"{text!r} has characters that the broker's settings cannot hold: choose another folder")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
