"""The hostile member from within: `thinpipe join` as everybody runs it, in which some functions lie when asked to.

It trains honestly otherwise, and says that its machine is faster than it is, so that it gets a place. What it says by
hand goes over connections of its own with its own key, which the hub cannot tell from those of its program.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from tests.swarm.hostile.adversary import Adversary
from thinpipe.core.numerics import numerics
from thinpipe.swarm.protocol.messages import Assignment, NextRequest
from thinpipe.swarm.protocol.status import Status

FASTER = 3.0
"""By so much it overstates the speed of its machine."""
ANSWER_SECONDS = 20.0
"""Longer than a hub that is alive needs for an answer."""
PLACE_SECONDS = 60.0
"""How long it waits for a place in a generation."""
_LOOK_SECONDS = 0.05
_RECORDED = 300


class Insider:
    """State of this process, and what its functions do next."""

    def __init__(self) -> None:
        self.process: Any = None
        """The running `PeerProcess`; None until it has connected."""
        self.assignment: Assignment | None = None
        """Of the generation that this process takes part in now."""
        self.remote_run: Any = None
        self.sent: deque[tuple[str, str, str, bytes]] = deque(maxlen=_RECORDED)
        """Newest messages of this process: how, to whom, of which kind, the data."""
        self.change_frame: Callable[[bytes], bytes] | None = None
        """Changes the next message of the pipeline."""
        self.change_sum: Callable[[list[float]], list[float]] | None = None
        """Changes the next shares of a sum."""
        self.change_files: Callable[[Any, int, dict[str, Any]], dict[str, Any]] | None = None
        """Changes what the next checkpoint of this process consists of."""

    @property
    def name(self) -> str:
        name: str = self.process.identity.name
        return name

    @property
    def others(self) -> list[str]:
        """Peers that are present, as the hub says."""
        return [peer.name for peer in self.status().peers if peer.name != self.name]

    def by_hand(self) -> Adversary:
        """A further connection with the same key."""
        return ByHand(self)

    def status(self) -> Status:
        with self.by_hand() as me:
            return msgspec.msgpack.decode(me.ask("status", b"", ANSWER_SECONDS), type=Status)

    def leave_generation(self, **fields: Any) -> None:
        """Says that this process has left its generation; without an assignment nothing is left."""
        if self.assignment is None:
            return
        request = NextRequest(
            incarnation=self.process.incarnation,
            numerics=numerics(),
            left_generation=self.assignment.generation,
            report=self.process.report,
            **fields,
        )
        with self.by_hand() as me:
            me.say("next", request)

    def wait_for_place(self, *, after: int = 0) -> Assignment:
        """In a generation later than `after`, in which messages of the pipeline have been sent already."""
        deadline = time.monotonic() + PLACE_SECONDS
        while time.monotonic() < deadline:
            assignment = self.assignment
            if assignment is not None and assignment.generation > after and any(how == "send" for how, *_ in self.sent):
                return assignment
            time.sleep(_LOOK_SECONDS)
        raise TimeoutError(f"no place in a generation within {PLACE_SECONDS:.0f} s")

    def become_first(self) -> Assignment:
        """Takes part as the first of the pipeline: what is slowest among the fastest comes first."""
        assignment = self.wait_for_place()
        rivals = sorted(
            peer.report.processor.flops
            for peer in self.status().peers
            if peer.report is not None and peer.name != self.name
        )
        faster = len(assignment.names) - 1
        if len(rivals) > faster:
            edges = rivals[-faster - 1], rivals[-faster]
            self.claim(flops=sum(edges) / 2)
        else:
            self.claim(flops=rivals[0] / 2)
        self.leave_generation()
        return self.wait_for_place(after=assignment.generation)

    def claim(self, *, flops: float, **link: float) -> None:
        """What this process says of its machine from now on."""
        report = self.process.report
        processor = msgspec.structs.replace(report.processor, flops=flops)
        self.process.report = msgspec.structs.replace(report, processor=processor, **link)

    def watch(self) -> None:
        """From now on the functions of this process do what they are asked to."""
        from thinpipe.checkpoint import CheckpointFolder
        from thinpipe.swarm.peer.hub_collectives import HubCollectives
        from thinpipe.swarm.peer.join import PeerProcess
        from thinpipe.swarm.peer.remote_run import RemoteRun

        wrap(PeerProcess, "_connect", self._connect)
        wrap(PeerProcess, "_measure", self._measure)
        wrap(PeerProcess, "_run_generation", self._run_generation)
        wrap(RemoteRun, "fetch", self._fetch)
        wrap(HubCollectives, "_all_reduce", self._all_reduce)
        wrap(CheckpointFolder, "write", self._write)

    # In place of functions of the same names; `honest` is the function itself

    def _connect(self, honest: Any, process: Any) -> Any:
        connection = honest(process)
        self.process = process
        send, publish, submit = connection.send, connection.publish, connection.submit

        def send_and_record(to: str, kind: str, data: bytes, *more: Any, **options: Any) -> None:
            if kind == "data" and self.change_frame is not None:
                change, self.change_frame = self.change_frame, None
                data = change(bytes(data))
            self.sent.append(("send", to, kind, bytes(data)))
            send(to, kind, data, *more, **options)

        def publish_and_record(service: str, data: bytes) -> None:
            self.sent.append(("publish", "hub", service, data))
            publish(service, data)

        def submit_and_record(service: str, data: bytes, **options: Any) -> Any:
            self.sent.append(("submit", "hub", service, data))
            return submit(service, data, **options)

        connection.send, connection.publish, connection.submit = send_and_record, publish_and_record, submit_and_record
        return connection

    def _measure(self, honest: Any, process: Any, *arguments: Any) -> None:
        before = process.report
        honest(process, *arguments)
        if process.report is not before:
            self.claim(flops=FASTER * process.report.processor.flops)

    def _run_generation(self, honest: Any, process: Any, connection: Any, assignment: Assignment) -> Any:
        self.assignment = assignment
        self.sent.clear()
        try:
            return honest(process, connection, assignment)
        finally:
            self.assignment = None

    def _fetch(self, honest: Any, remote_run: Any, *arguments: Any) -> Any:
        self.remote_run = remote_run
        return honest(remote_run, *arguments)

    def _all_reduce(self, honest: Any, collectives: Any, op: str, numbers: Any) -> Any:
        if self.change_sum is not None:
            numbers = self.change_sum(list(numbers))
        return honest(collectives, op, numbers)

    def _write(self, honest: Any, folder: Any, step: int, layers: Any) -> Any:
        files = honest(folder, step, layers)
        if self.change_files is not None:
            change, self.change_files = self.change_files, None
            files = change(folder, step, dict(files))
        return files


class ByHand(Adversary):
    """A connection of its own, which says what it likes in the name of this process."""

    def __init__(self, insider: Insider) -> None:
        self._connect(insider.process.identity.address)  # type: ignore[no-untyped-call]
        self.incarnation, self.generation = insider.process.incarnation, 0


def wrap(owner: type, name: str, instead: Callable[..., Any]) -> None:
    """`instead` is called with the honest function and its arguments."""
    honest = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: instead(honest, *arguments, **named))
