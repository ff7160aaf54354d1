"""Connection of a process to the hub's NATS server, run by an asyncio loop in a thread, so that training does not block
on sockets.

Two NATS connections with one key: bulk messages on one; credit, heartbeats and requests on the other, so that these
never queue behind a large message. There is no reconnect: messages may have been lost with a connection, so its loss is
reported at once as a failure.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from thinpipe.core.foreign import ProtocolError
from thinpipe.transport.nats.activity import HUB, ActivityTracker
from thinpipe.transport.nats.client import Credentials, as_connection_error, connect
from thinpipe.transport.nats.direct_client import DirectClient
from thinpipe.transport.nats.direct_client import Receiver as DirectReceiver
from thinpipe.transport.nats.service_error import FAILED, FORBIDDEN, INVALID, HubFailedError, error_code

HEARTBEAT_SECONDS = 0.5
"""Seconds between heartbeats; far below the hub's default timeout, so that short pauses of a process are tolerated."""
_LOG = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.05, 2.0
"""Pause before a request is repeated, and the longest one; each is twice the one before."""
_CLOSE_SECONDS = 2.0
"""Limit for closing the client of a lane."""
_CANCEL_SECONDS = 1.0
"""Limit for what is left of a connection's tasks to end when they are cancelled."""
_NO_HUB_SECONDS = 10.0
"""Seconds for which a request that nobody listens to is repeated: the hub starts, or dials its server again."""
_LEFT = "we have left the hub"
Result = TypeVar("Result")
Receiver = Callable[[str, bytes], None]
"""Callback with the name of the sending peer and the data; runs in the connection thread and must not block. A message
for which it raises ProtocolError is dropped."""
Cancel = Callable[[], None]
"""Function that ends a subscription."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of the NATS server and credentials of this process."""

    url: str
    fingerprint: str
    """sha256 of the server's TLS certificate, in hex."""
    name: str
    """Name of this peer; part of its NATS subjects and permissions."""
    credentials: Credentials


@dataclass
class _Lane:
    """Send queue of one NATS connection: (subject, data, callback once written), in order."""

    client: DirectClient
    waiting: deque[tuple[str, bytes, Callable[[], None] | None]] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    closing: bool = False
    """True once nothing more will be queued."""


@contextmanager
def _dropped_if_invalid(subject: str) -> Iterator[None]:
    """Context of a receiver: what it refuses is dropped, since an error in a callback would end the connection."""
    try:
        yield
    except ProtocolError as error:
        _LOG.warning("dropped a message to %s: %s", subject, error)


class HubConnection:
    """Connection to the hub, opened by the constructor; after a failure, nothing can be sent or received any more.

    `incarnation` identifies this start of the process and is sent with every heartbeat; empty for an observer, whose
    heartbeats the hub ignores. Methods may be called from any thread; in the connection thread only `send`, `publish`
    and `submit`, which do not wait.
    """

    def __init__(self, address: Address, *, incarnation: str = "") -> None:
        self.address, self.activity = address, ActivityTracker(incarnation)
        self._loop = asyncio.new_event_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._watchers: list[Callable[[Exception], None]] = []
        self._failure: Exception | None = None
        self._closed_future: asyncio.Future[None]
        """Resolved on failure or close: pending requests can no longer be answered."""
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="thinpipe-connection", daemon=True)
        self._thread.start()
        try:
            self._bulk, self._urgent = self._call(self._open(), seconds=30)
        except BaseException:
            self._end()
            raise

    def send(
        self, to: str, kind: str, data: bytes, sent: Callable[[], None] | None = None, *, urgent: bool = False
    ) -> None:
        """Queues a message to peer `to`, from any thread. Order is kept among urgent messages and among the others.

        `sent` is called in the connection thread when the socket has taken the message.
        """
        lane = self._urgent if urgent else self._bulk
        lane.waiting.append((f"m.{to}.{self.address.name}.{kind}", data, sent))
        self._loop.call_soon_threadsafe(lane.changed.set)

    def on_failure(self, watcher: Callable[[Exception], None]) -> None:
        """Registers a callback for the failure of the connection: called once, in the connection thread; at once if the
        connection has failed already."""

        async def add() -> None:
            if self._failure is not None:
                watcher(self._failure)
            else:
                self._watchers.append(watcher)

        self._call(add())

    def subscribe(self, kind: str, receiver: Receiver, *, senders: Collection[str], urgent: bool = False) -> Cancel:
        """Subscribes to messages of this kind from these peers; the server drops what others send. No message sent
        after this call returns is missed."""
        lane = self._urgent if urgent else self._bulk

        def arrived(subject: str, reply: str, data: bytes) -> None:
            if reply:
                return  # peers never set it: a forged request made a service reply to this subject
            try:
                with _dropped_if_invalid(subject):
                    receiver(subject.split(".")[2], data)
            except Exception as error:
                self._fail(as_connection_error(error))

        return self._call(
            self._receive(lane.client, [f"m.{self.address.name}.{name}.{kind}" for name in senders], arrived)
        )

    def subscribe_broadcast(self, subject: str, receiver: Callable[[bytes], None]) -> Cancel:
        """Subscribes to broadcasts of the hub on this subject."""

        async def arrived(message: Msg) -> None:
            with _dropped_if_invalid(message.subject):
                receiver(message.data)

        return self._call(self._subscribe(self._urgent.client, f"bcast.{subject}", arrived))

    def publish(self, service: str, data: bytes) -> None:
        """Queues a message to a service of the hub without waiting for a reply; order is kept."""
        self._urgent.waiting.append((f"hub.{self.address.name}.{service}", data, None))
        self._loop.call_soon_threadsafe(self._urgent.changed.set)

    def submit(self, service: str, data: bytes, *, seconds: float, bulk: bool = False) -> Future[bytes]:
        """Sends a request to a service of the hub; returns a future of the reply.

        The future raises TimeoutError after `seconds`, or ConnectionError at once if the hub is lost. `bulk`: for large
        requests or replies, which share the connection of pipeline messages and must not delay heartbeats.
        """
        if self._closed:
            raise ConnectionError(_LEFT)
        lane = self._bulk if bulk else self._urgent
        return asyncio.run_coroutine_threadsafe(self._request(lane, service, data, seconds), self._loop)

    def request(self, service: str, data: bytes, *, seconds: float) -> bytes:
        """Sends a request to a service of the hub and waits for the reply; raises as `submit`'s future."""
        return self.await_reply(self.submit(service, data, seconds=seconds), seconds=seconds)

    def await_reply(self, pending: Future[bytes], *, seconds: float) -> bytes:
        """Waits for the reply to a `submit`, recorded as waiting for the hub; `seconds` as passed to `submit`."""
        with self.activity.waiting(HUB, pending.done):
            return pending.result(timeout=seconds + 5)

    def close(self, *, linger_seconds: float = 2.0) -> None:
        """Closes the connection after sending queued messages, for up to `linger_seconds`."""
        if self._closed:
            return
        self._closed = True
        try:
            self._call(self._leave(linger_seconds), seconds=linger_seconds + 5)
        except TimeoutError:  # an unresponsive hub must not block closing
            _LOG.warning("the connection to the hub was closed before all queued messages had left")
        finally:
            self._end()

    async def _request(self, lane: _Lane, service: str, data: bytes, seconds: float) -> bytes:
        """Asks again for a while where nobody listens, as while the hub starts, and where the hub says that this peer
        asks for too much."""
        began, pause = self._loop.time(), _FIRST_RETRY_SECONDS
        while True:
            left = seconds - (self._loop.time() - began)
            try:
                code = await self._ask(lane, f"hub.{self.address.name}.{service}", data, left)
            except NatsTimeoutError:
                raise self._failure or TimeoutError(f"the hub did not answer within {seconds:g} s") from None
            if isinstance(code, bytes):
                return code
            if code == FAILED:
                raise HubFailedError(
                    f"the hub failed while it handled a request of this machine ({service}): its owner finds the cause "
                    "in hub/hub.log. Nothing is wrong here"
                )
            if code == FORBIDDEN:
                raise ConnectionError(f"the hub has refused a request of this machine to {service}: it is for another")
            if code == INVALID:
                raise ProtocolError(
                    f"the hub cannot read a request of this machine to {service}: install the hub's version of thinpipe"
                )
            waited = self._loop.time() - began
            if code is None and waited + pause > _NO_HUB_SECONDS:
                raise ConnectionError("the hub is not running")
            if waited + pause > seconds:
                raise TimeoutError(f"the hub takes no more requests to {service} now: this machine asks too much")
            await self._until_closed(asyncio.sleep(pause))
            pause = min(2 * pause, _MAX_RETRY_SECONDS)

    async def _ask(self, lane: _Lane, subject: str, data: bytes, seconds: float) -> bytes | int | None:
        """The reply, or the code of an error, or None if nobody listens."""
        if self._failure is not None:
            raise self._failure
        try:
            answer = await self._until_closed(lane.client.request(subject, data, timeout=seconds))
        except NoRespondersError:
            return None
        except NatsTimeoutError:
            raise
        except NatsError as error:
            raise self._failure or ConnectionError(f"the hub could not be asked: {error}") from error
        return answer.data if (code := error_code(answer.headers)) is None else code

    async def _until_closed(self, pending: Coroutine[Any, Any, Result]) -> Result:
        """Awaits `pending`, or raises once the connection is lost or closed: the NATS client would keep waiting."""
        task = asyncio.ensure_future(pending)
        task.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # retrieve the exception: perhaps nobody awaits it
        try:
            await asyncio.wait((task, self._closed_future), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._failure or ConnectionError(_LEFT)
            return task.result()
        finally:
            task.cancel()

    async def _open(self) -> tuple[_Lane, _Lane]:
        self._closed_future = self._loop.create_future()
        lanes = []
        for _ in range(2):
            client = await connect(
                self.address.url,
                self.address.fingerprint,
                self.address.credentials,
                inbox=f"_INBOX.{self.address.name}",
                on_down=self._fail,
            )
            lanes.append(_Lane(client))
        bulk, urgent = lanes
        self._tasks = [
            *(asyncio.create_task(self._pump(lane)) for lane in lanes),
            asyncio.create_task(self._send_heartbeats(urgent)),
        ]
        return bulk, urgent

    async def _subscribe(
        self, client: Client, subject: str, arrived: Callable[[Msg], Coroutine[Any, Any, None]]
    ) -> Cancel:
        try:
            subscription = await client.subscribe(subject, cb=arrived, pending_bytes_limit=0, pending_msgs_limit=0)
            await client.flush(timeout=10)
        except NatsError as error:
            raise self._failed(error) from error

        async def end() -> None:
            if client.is_connected:
                await subscription.unsubscribe()

        return lambda: None if self._closed or self._failure else self._call(end())

    async def _receive(self, client: DirectClient, subjects: Collection[str], arrived: DirectReceiver) -> Cancel:
        try:
            numbers = await client.receive(dict.fromkeys(subjects, 0), arrived)
            await client.flush(timeout=10)
        except NatsError as error:
            raise self._failed(error) from error

        async def end() -> None:
            await client.stop_receiving(numbers)

        return lambda: None if self._closed or self._failure else self._call(end())

    async def _pump(self, lane: _Lane) -> None:
        try:
            while True:
                while lane.waiting:
                    subject, data, sent = lane.waiting.popleft()
                    await lane.client.publish(subject, data)
                    if sent is not None:
                        sent()
                if lane.closing:
                    return
                lane.changed.clear()
                await lane.changed.wait()
        except Exception as error:
            self._fail(as_connection_error(error))

    async def _send_heartbeats(self, lane: _Lane) -> None:
        """Sends heartbeats from the connection thread, because the training thread may compute for minutes."""
        while not lane.closing:
            heartbeat = msgspec.msgpack.encode(self.activity.heartbeat())
            lane.waiting.append((f"hub.{self.address.name}.heartbeat", heartbeat, None))
            lane.changed.set()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _leave(self, seconds: float) -> None:
        lanes = (self._bulk, self._urgent)
        for lane in lanes:
            lane.closing = True
            lane.changed.set()
        *pumps, heartbeat = self._tasks
        heartbeat.cancel()
        if self._failure is None:  # wait before cancelling: a message must not be truncated while it is written
            await asyncio.wait(pumps, timeout=seconds)
        for task in pumps:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=1)
        self._cancel_requests()
        for lane in lanes:
            await lane.client.close_within(_CLOSE_SECONDS)

    def _failed(self, error: NatsError) -> Exception:
        """Why the connection has failed; it fails now if it had not. Where the server does not take a subscription, as
        on a link that was cut and on which TCP still waits, whoever goes on would fail again and again."""
        self._fail(as_connection_error(error))
        return self._failure or as_connection_error(error)

    def _fail(self, error: Exception) -> None:
        if self._failure is None and not self._closed:
            self._failure = error
            self._cancel_requests()
            for watcher in self._watchers:
                watcher(error)

    def _cancel_requests(self) -> None:
        if not self._closed_future.done():
            self._closed_future.set_result(None)

    def _call(self, pending: Coroutine[Any, Any, Result], *, seconds: float = 15) -> Result:
        if threading.current_thread() is self._thread:
            raise RuntimeError("the connection's own thread must not wait for itself")
        future: Future[Result] = asyncio.run_coroutine_threadsafe(pending, self._loop)
        return future.result(timeout=seconds)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if self._thread.is_alive():
            return
        left = asyncio.all_tasks(self._loop)  # of a client that an interrupted link kept from closing
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=_CANCEL_SECONDS))
        self._loop.close()
