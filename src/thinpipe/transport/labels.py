"""What a message is, beside its bytes. A group that can tell its receivers compares what both ends mean."""

from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Label:
    step: int = 0
    microbatch: int = 0
    basis_version: int = 0
    basis_hash: bytes = bytes(8)
    """The beginning of its sha256: a wrong basis leaves every norm as it was, so only this can tell."""


@runtime_checkable
class Labelled(Protocol):
    """A process group that sends labels along."""

    def label(self, tag: int, label: Label) -> None:
        """What sends and receives on this tag are from now on; both ends must say the same."""
        ...


def is_labelled(group: object) -> TypeGuard[Labelled]:
    return isinstance(group, Labelled)
