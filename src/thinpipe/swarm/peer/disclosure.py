"""Tells a machine's user who can read the data of the run: before it joins, and when it comes back."""

from collections.abc import Callable

from thinpipe.core.foreign import decode_foreign
from thinpipe.swarm.protocol.status import Status
from thinpipe.transport.nats.connection import HubConnection

_SECONDS = 30.0


class Disclosure:
    """Prints the hub's sentence once in a program."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print, self._is_known = print_line, False

    def tell(self, who_reads: str) -> None:
        """Prints the sentence of a hub; an older hub says nothing."""
        if who_reads and not self._is_known:
            self._is_known = True
            self._print(who_reads)

    def ask(self, connection: HubConnection) -> None:
        """Asks the hub, unless it has said so already. Of a run that was joined earlier it may have changed."""
        if not self._is_known:
            self.tell(decode_foreign(connection.request("status", b"", seconds=_SECONDS), Status).who_reads)
