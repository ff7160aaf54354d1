"""What a hub's folder remembers of its broker: its port, its own keys, who belongs and who is invited."""

from dataclasses import dataclass, field
from pathlib import Path

from thinpipe.core.config import dump_toml, load_toml
from thinpipe.core.files import write_atomically


@dataclass(frozen=True, kw_only=True)
class Members:
    port: int
    """Peers dial it again after a restart, so it stays."""
    hub_seed: str = field(repr=False)
    admin_seed: str = field(repr=False)
    peers: dict[str, str] = field(default_factory=dict)
    """Public keys by name."""
    invites: dict[str, str] = field(default_factory=dict)
    """Public keys by id."""


def load_members(path: Path) -> Members | None:
    return load_toml(path, Members) if path.exists() else None


def save_members(path: Path, members: Members) -> None:
    write_atomically(path, dump_toml(members).encode(), mode=0o600)
