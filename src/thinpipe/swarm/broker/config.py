"""Renders the configuration of nats-server. Pure: reads and writes no files.

It names nobody but the operator and its two accounts (`broker.authority`): who may sign in, and what for, is said by
JWTs that these sign. So the file is written once at each start and never loaded again while the server runs.
"""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.swarm.protocol.keys import is_public_key

_HOST = re.compile(r"[A-Za-z0-9.:-]{1,255}", re.ASCII)
_JWT = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of nats-server."""

    payload_nbytes: int = 8 << 20
    """Maximum size of one message in bytes, header included. nats-server advises against more."""
    pending_nbytes: int = 256 << 20
    """Maximum bytes queued for one connection; beyond it the server closes the connection and drops the queue."""
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
    log: Path
    """Log file of the server."""
    operator_jwt: str
    """Statement of the operator, whose key the server trusts, about itself."""
    account: str
    """Public key of the account of hub and peers."""
    account_jwt: str
    """Statement of the operator about that account: its signing keys, and the keys that are revoked."""
    system_account: str
    """Public key of the system account, which sees connects and disconnects and may change accounts."""
    system_jwt: str
    """Statement of the operator about the system account."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise UserError(
                f"{self.host!r} is not an address to listen on: use an address such as 0.0.0.0 or 127.0.0.1"
            )
        if type(self.port) is not int or not 0 < self.port < 65536:
            raise UserError(f"{self.port!r} is not a port: use a number from 1 to 65535")
        for key in (self.account, self.system_account):
            if not is_public_key(key, "account"):
                raise UserError(f"{key[:80]!r} is not an account's public key (56 letters and digits from A on)")
        if not all(map(_JWT.fullmatch, (self.operator_jwt, self.account_jwt, self.system_jwt))):
            raise UserError("a JWT has letters that no JWT has")


def render(config: BrokerConfig) -> str:
    """The text of the server's configuration file."""
    limits = config.limits
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
            f"operator: {_quoted(config.operator_jwt)}",
            f"system_account: {config.system_account}",
            "resolver: MEMORY",
            "resolver_preload {",
            f"  {config.system_account}: {_quoted(config.system_jwt)}",
            f"  {config.account}: {_quoted(config.account_jwt)}",
            "}",
            "",
        )
    )


def _quoted(value: Path | str) -> str:
    text = value.as_posix() if isinstance(value, Path) else value
    if not text.isprintable():
        raise UserError(
            f"{text!r} has characters that the configuration of nats-server cannot contain: choose another folder"
        )
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
