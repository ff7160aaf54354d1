"""Message labels: metadata that identifies a pipeline message. A group that transmits labels checks that sender and
receiver agree on them."""

from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Label:
    """Identity of a message; the tag of the message identifies boundary and direction."""

    step: int = 0
    microbatch: int = 0
    basis_version: int = 0
    basis_hash: bytes = bytes(8)
    """First 8 bytes of the sha256 of the basis. A wrong basis does not change norms, so only the hash reveals it."""


@runtime_checkable
class Labelled(Protocol):
    """Process group that transmits labels with messages and compares them on receipt."""

    def label(self, tag: int, label: Label) -> None:
        """Sets the label of all following sends and receives on `tag`; both ends must set the same."""
        ...


def is_labelled(group: object) -> TypeGuard[Labelled]:
    return isinstance(group, Labelled)
