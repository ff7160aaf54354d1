"""A thread that talks to the server, so that training never waits for a socket it does not need.

Two connections with one key: bulk mail on one, credit, heartbeats and requests on the other, which thus never queue
behind a large message. Nothing reconnects by itself: a lost connection may have lost mail, and is told at once.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from thinpipe.transport.nats.dial import as_connection_error, connect
from thinpipe.transport.nats.progress import HUB, Progress

BEAT_SECONDS = 0.5
"""Half of what a hub expects, so that a pause of two seconds is never taken for one of three."""
_LEFT = "we have left the hub"
Result = TypeVar("Result")
Receiver = Callable[[str, bytes], None]
"""Is told who wrote and what; runs in the post's thread and must not block."""
Cancel = Callable[[], None]
"""Ends a subscription."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server is and who we are to it."""

    url: str
    fingerprint: str
    """Of its certificate."""
    name: str
    """Ours; subjects and permissions are made of it."""
    seed: str = field(repr=False)
    """Of our key."""


@dataclass
class _Lane:
    """What waits to be sent on one connection, in order."""

    client: Client
    waiting: deque[tuple[str, bytes, Callable[[], None] | None]] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    closing: bool = False
    """Nothing more will come."""


class Post:
    """Open from the beginning. When it has failed, nothing can be sent or received any more.

    `life` is told with every heartbeat; empty: of one who only looks, whose heart does not count."""

    def __init__(self, address: Address, *, life: str = "") -> None:
        self.address, self.progress = address, Progress(life)
        self._loop = asyncio.new_event_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._watchers: list[Callable[[Exception], None]] = []
        self._failure: Exception | None = None
        self._over: asyncio.Future[None]
        """Done when no answer can come any more."""
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="thinpipe-post", daemon=True)
        self._thread.start()
        try:
            self._bulk, self._urgent = self._call(self._open(), seconds=30)
        except BaseException:
            self._end()
            raise

    def send(
        self, to: str, kind: str, data: bytes, sent: Callable[[], None] | None = None, *, urgent: bool = False
    ) -> None:
        """From any thread; mail of one lane keeps its order. `sent` is called when the socket has taken it."""
        lane = self._urgent if urgent else self._bulk
        lane.waiting.append((f"m.{to}.{self.address.name}.{kind}", data, sent))
        self._loop.call_soon_threadsafe(lane.changed.set)

    def on_failure(self, watcher: Callable[[Exception], None]) -> None:
        """Called once with the reason, in the post's thread; at once, if the post has failed already."""

        async def add() -> None:
            if self._failure is not None:
                watcher(self._failure)
            else:
                self._watchers.append(watcher)

        self._call(add())

    def receive(self, kind: str, receiver: Receiver, *, urgent: bool = False) -> Cancel:
        """Mail of this kind for us. When this returns, nothing that is sent from now on is missed."""
        lane = self._urgent if urgent else self._bulk

        async def arrived(message: Msg) -> None:
            if message.headers or message.reply:
                return  # no peer sends these: they come through a service that was asked to answer to us
            receiver(message.subject.split(".")[2], message.data)

        return self._call(self._subscribe(lane.client, f"m.{self.address.name}.*.{kind}", arrived))

    def listen(self, subject: str, receiver: Callable[[bytes], None]) -> Cancel:
        """What the hub tells everybody."""

        async def arrived(message: Msg) -> None:
            receiver(message.data)

        return self._call(self._subscribe(self._urgent.client, f"bcast.{subject}", arrived))

    def tell(self, service: str, data: bytes) -> None:
        """The hub, without waiting for an answer; in order."""
        self._urgent.waiting.append((f"hub.{self.address.name}.{service}", data, None))
        self._loop.call_soon_threadsafe(self._urgent.changed.set)

    def ask(self, service: str, data: bytes, *, seconds: float, bulk: bool = False) -> Future[bytes]:
        """An answer of the hub, later; a TimeoutError after so long, a ConnectionError at once when the hub is lost.

        `bulk` is for large questions and answers: they share a connection with the messages of the pipeline, and leave
        the heartbeats theirs.
        """
        if self._closed:
            raise ConnectionError(_LEFT)
        lane = self._bulk if bulk else self._urgent
        return asyncio.run_coroutine_threadsafe(self._ask(lane, service, data, seconds), self._loop)

    def request(self, service: str, data: bytes, *, seconds: float) -> bytes:
        """An answer of the hub, now."""
        return self.take(self.ask(service, data, seconds=seconds), seconds=seconds)

    def take(self, asked: Future[bytes], *, seconds: float) -> bytes:
        """What was asked, when it has come; `seconds` as it was asked."""
        with self.progress.waiting(HUB, asked.done):
            return asked.result(timeout=seconds + 5)

    def close(self, *, linger_seconds: float = 2.0) -> None:
        """Lets what waits leave, for so long."""
        if self._closed:
            return
        self._closed = True
        try:
            with suppress(TimeoutError):  # a hub that does not answer must not keep us
                self._call(self._leave(linger_seconds), seconds=linger_seconds + 5)
        finally:
            self._end()

    async def _ask(self, lane: _Lane, service: str, data: bytes, seconds: float) -> bytes:
        if self._failure is not None:
            raise self._failure
        try:
            answer = await self._unless_over(
                lane.client.request(f"hub.{self.address.name}.{service}", data, timeout=seconds)
            )
        except NoRespondersError:
            raise ConnectionError("the hub is not there") from None
        except NatsTimeoutError:
            raise self._failure or TimeoutError(f"the hub did not answer within {seconds:g} s") from None
        except NatsError as error:
            raise self._failure or ConnectionError(f"the hub could not be asked: {error}") from error
        return answer.data

    async def _unless_over(self, asked: Coroutine[Any, Any, Result]) -> Result:
        """The client by itself would wait for an answer on a connection that is lost."""
        task = asyncio.ensure_future(asked)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # may be wanted by nobody
        try:
            await asyncio.wait((task, self._over), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._failure or ConnectionError(_LEFT)
            return task.result()
        finally:
            task.cancel()

    async def _open(self) -> tuple[_Lane, _Lane]:
        self._over = self._loop.create_future()
        lanes = []
        for _ in range(2):
            client = await connect(
                self.address.url,
                self.address.fingerprint,
                self.address.seed,
                inbox=f"_INBOX.{self.address.name}",
                on_down=self._fail,
            )
            lanes.append(_Lane(client))
        bulk, urgent = lanes
        self._tasks = [
            *(asyncio.create_task(self._pump(lane)) for lane in lanes),
            asyncio.create_task(self._beat(urgent)),
        ]
        return bulk, urgent

    async def _subscribe(
        self, client: Client, subject: str, arrived: Callable[[Msg], Coroutine[Any, Any, None]]
    ) -> Cancel:
        try:
            subscription = await client.subscribe(subject, cb=arrived, pending_bytes_limit=0, pending_msgs_limit=0)
            await client.flush(timeout=10)
        except NatsError as error:
            raise self._failure or as_connection_error(error) from error

        async def end() -> None:
            if client.is_connected:
                await subscription.unsubscribe()

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

    async def _beat(self, lane: _Lane) -> None:
        """From this thread: training may compute for minutes."""
        while not lane.closing:
            beat = msgspec.msgpack.encode(self.progress.beat())
            lane.waiting.append((f"hub.{self.address.name}.beat", beat, None))
            lane.changed.set()
            await asyncio.sleep(BEAT_SECONDS)

    async def _leave(self, seconds: float) -> None:
        lanes = (self._bulk, self._urgent)
        for lane in lanes:
            lane.closing = True
            lane.changed.set()
        *pumps, beat = self._tasks
        beat.cancel()
        if self._failure is None:  # not cancelled: a message that is being written must not be cut
            await asyncio.wait(pumps, timeout=seconds)
        for task in pumps:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=1)
        self._end_asks()
        for lane in lanes:
            if lane.client.is_connected:
                await asyncio.wait_for(lane.client.close(), timeout=2)

    def _fail(self, error: Exception) -> None:
        if self._failure is None and not self._closed:
            self._failure = error
            self._end_asks()
            for watcher in self._watchers:
                watcher(error)

    def _end_asks(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _call(self, asked: Coroutine[Any, Any, Result], *, seconds: float = 15) -> Result:
        if threading.current_thread() is self._thread:
            raise RuntimeError("the post's own thread must not wait for itself")
        future: Future[Result] = asyncio.run_coroutine_threadsafe(asked, self._loop)
        return future.result(timeout=seconds)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()
