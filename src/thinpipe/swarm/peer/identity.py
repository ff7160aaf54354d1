"""A peer's identity: its name and key in a run and the hub's JWTs for them, stored in the peer's folder for
rejoining."""

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.core.run_folder import IDENTITY
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.transport.nats.client import Credentials
from thinpipe.transport.nats.connection import Address

_KEY_FILE = "key.toml"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Name and key of a peer in a run, with the address of its hub."""

    run: str
    """Name of the run."""
    invite: str
    """Id of the invite that was exchanged for this identity."""
    url: str
    """URL of the broker."""
    fingerprint: str
    """sha256 fingerprint of the broker's certificate."""
    name: str
    """Peer name."""
    seed: str = field(repr=False)
    """Seed of the peer's key."""
    jwt: str = field(repr=False)
    """The hub's statement that this key may sign in as this peer."""
    renewal: str = field(repr=False)
    """The hub's statement that this key may ask for a new `jwt`; never expires."""

    @property
    def address(self) -> Address:
        return self._address(self.jwt)

    @property
    def renewal_address(self) -> Address:
        """Address at which this peer may only ask for a new JWT."""
        return self._address(self.renewal)

    def _address(self, jwt: str) -> Address:
        credentials = Credentials(seed=self.seed, jwt=jwt)
        return Address(url=self.url, fingerprint=self.fingerprint, name=self.name, credentials=credentials)


@dataclass(frozen=True, kw_only=True)
class _JoiningKey:
    """Key of a machine that has asked to join and has no answer yet."""

    seed: str = field(repr=False)


def load_identity(folder: Path) -> Identity | None:
    """The identity stored in this folder; None if there is none. Raises UserError if it is of an earlier thinpipe."""
    path = folder / IDENTITY
    if not path.exists():
        return None
    try:
        is_old = "jwt" not in tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        is_old = False  # `load_toml` says what is wrong
    if is_old:
        raise UserError(
            f"{path} is of an earlier thinpipe, whose keys open nothing any more: ask the hub's owner for a new invite "
            "and join with it in a new folder"
        )
    return load_toml(path, Identity)


def save_identity(folder: Path, identity: Identity) -> None:
    """Stores the identity, in place of the key that waited for it."""
    write_atomically(folder / IDENTITY, dump_toml(identity).encode(), mode=0o600)
    (folder / _KEY_FILE).unlink(missing_ok=True)


def save_jwt(folder: Path, jwt: str) -> None:
    """Replaces the JWT in the identity stored in this folder, if there is one."""
    known = load_identity(folder)
    if known is not None and known.jwt != jwt:
        save_identity(folder, replace(known, jwt=jwt))


def joining_key(folder: Path) -> KeyPair:
    """The key with which the machine joins in this folder, created now if there is none. It is on disk when this
    returns: whatever happens after the hub has entered it as a member, the machine can ask again with the same key."""
    path = folder / _KEY_FILE
    if path.exists():
        return KeyPair.from_seed(load_toml(path, _JoiningKey).seed)
    pair = KeyPair.new()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dump_toml(_JoiningKey(seed=pair.seed)).encode(), mode=0o600)
    return pair
