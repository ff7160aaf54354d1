"""Tells a machine's user what the machine will compute, send, keep and see: before it joins, and when it comes back."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from thinpipe.config.hub import JoinConfig
from thinpipe.core.foreign import decode_foreign
from thinpipe.swarm.peer.identity import Identity
from thinpipe.swarm.protocol.messages import Assignment
from thinpipe.swarm.protocol.status import Status
from thinpipe.transport.nats.connection import HubConnection

_SECONDS = 30.0
_UNKNOWN = "who can read the data: this hub does not say"
Tell = Callable[[str, str, str, Path], None]
"""Called with who can read the data, the name of the run, the hub's URL and the folder of this peer."""


class Disclosure:
    """Prints four sentences once in a program. `config`: what the user lends."""

    def __init__(self, print_line: Callable[[str], None], config: JoinConfig) -> None:
        self._print, self._config, self._is_known = print_line, config, False

    def tell(self, who_reads: str, run: str, url: str, folder: Path) -> None:
        """`who_reads`: the hub's sentence; empty if the hub is too old to say it."""
        if not self._is_known:
            self._is_known = True
            self._print("\n".join(sentences(self._config, who_reads or _UNKNOWN, run, url, folder)))

    def ask(self, connection: HubConnection, identity: Identity, folder: Path) -> None:
        """Asks the hub, unless it has said so already. Of a run that was joined earlier it may have changed."""
        if not self._is_known:
            status = decode_foreign(connection.request("status", b"", seconds=_SECONDS), Status)
            self.tell(status.who_reads, identity.run, identity.url, folder)


def sentences(config: JoinConfig, who_reads: str, run: str, url: str, folder: Path) -> list[str]:
    """A title, and a sentence each of what this machine computes, sends, keeps and sees."""
    device = "its graphics card if torch sees one, else its processor" if config.device == "auto" else config.device
    memory = "what memory is free" if config.memory is None else f"at most {config.memory} of memory"
    return [
        f"before it begins, what this machine will do in run {run} of the hub at {urlsplit(url).netloc}:",
        f"  compute: a part of the model's layers on {device}, with {memory}, until the run ends or Ctrl+C is pressed",
        "  send:    results of its layers, its part of checkpoints, its speed, memory and versions: to the hub alone, "
        "encrypted, whose owner also sees this machine's address; no other file of this machine",
        f"  keep:    a key, its part of the model and of checkpoints, a log, all in {folder}: delete it after the run",
        f"  see:     the numbers that other machines send it, their names and how fast they are; {who_reads}",
    ]


def describe_assignment(assignment: Assignment, mine: int) -> str:
    """What this machine computes, and between whom. `mine`: its place in the pipeline."""
    names, shares = assignment.names, assignment.shares
    between = "all of them"
    if len(names) > 1:
        before = f"after {names[mine - 1]}" if mine else "the first ones"
        after = f"before {names[mine + 1]}" if mine + 1 < len(names) else "the last ones"
        between = f"{before}, {after}"
    return (
        f"generation {assignment.generation}: {names[mine]} (this machine) computes {shares[mine]} of {sum(shares)} "
        f"segments, {between}; {assignment.text}"
    )
