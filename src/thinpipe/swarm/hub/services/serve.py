"""Serves requests over NATS: a service is a coroutine function from the sender's name and the request data to the
reply.

Requests arrive on `hub.<peer>.<service>`. The broker lets a peer publish only under its own name, so the sender is
known; but a request may name any reply subject, so replies are sent only to the sender's own inbox. Holders of invites
ask on `join.<invite>` alone, and are served as peers are.

The hub subscribes to each service for each peer by itself, with a limit to what the server may hold for it. So a flood
neither fills the queue in front of the hub nor has to be read: the hub stops listening to the flooder at this service,
and the server drops what it sends there.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress

from nats.errors import Error as NatsError

from thinpipe.core.foreign import ProtocolError
from thinpipe.swarm.hub.services.budgets import BUDGETS, Bucket, Budget
from thinpipe.swarm.hub.services.fair_queue import FairQueue, Request
from thinpipe.swarm.hub.services.floods import PROBATION_LIMIT, Floods
from thinpipe.swarm.protocol.names import HUB, JOIN
from thinpipe.transport.nats.direct_client import DirectClient
from thinpipe.transport.nats.service_error import FAILED, FORBIDDEN, INVALID, SLOW_DOWN, error_headers

_LOG = logging.getLogger(__name__)
Service = Callable[[str, bytes], Awaitable[bytes | None]]
"""Handler of requests: (peer, data) to the reply, or None for no reply. Raises ProtocolError for a malformed
request, NotAllowedError for one that is not for this peer."""
_STARTED_PER_TURN = 32
"""Requests started before the event loop reads again, so that urgent ones that arrive meanwhile come next."""


class Refusal(bytes):
    """A reply by which a service refuses a request, in its own words."""


class NotAllowedError(Exception):
    """A peer has asked for what is not for it."""


class Services:
    """The services of the hub, by name. `tell_owner` prints a line for the hub's owner.

    Requests run concurrently, each in its own task, in the order of `FairQueue`. A request gets no reply if the service
    returns None (malformed), and a reply with `error_headers` if the service raises or the peer exceeds its budget.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        tell_owner: Callable[[str], None] = lambda _text: None,
        *,
        budgets: Mapping[str, Budget] = BUDGETS,
    ) -> None:
        self._services, self._tell_owner = services, tell_owner
        self._budgets = {name: budgets[name] for name in services}
        self._queue = FairQueue(self._budgets)
        self._floods = Floods()
        self._refused: dict[tuple[str, str], Bucket] = {}
        self._failures: Counter[str] = Counter()
        self._subscriptions: dict[str, dict[str, list[int]]] = {}
        """Numbers of the subscriptions to each peer, by service."""
        self._received: Counter[tuple[str, str]] = Counter()
        """Requests of a peer to a service since its limit at the server was last renewed."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumping = False
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, client: DirectClient, peers: Collection[str]) -> None:
        """Serves these peers on this connection, which replaces an earlier one. Every request sent after this returns
        is received."""
        self._client, self._subscriptions = client, {}
        self._received.clear()
        self._loop = asyncio.get_running_loop()
        await self.set_peers(peers)
        await client.flush(timeout=10)

    async def set_peers(self, peers: Collection[str]) -> None:
        """Serves exactly these peers from now on."""
        for peer in self._subscriptions.keys() - set(peers):
            of_peer = self._subscriptions.pop(peer, {})  # it may be called again before this call returns
            await self._client.stop_receiving([number for numbers in of_peer.values() for number in numbers])
            self._queue.forget(peer)
            self._floods.forget(peer)
            for service in self._services:
                self._refused.pop((peer, service), None)
        for peer in set(peers) - self._subscriptions.keys():
            if peer in self._subscriptions:
                continue
            self._subscriptions[peer] = {}
            for service in self._services:
                await self._listen(peer, service)

    def troubles(self) -> list[str]:
        """Services that failed and peers that flood, in words."""
        failed = [f"the service `{name}` failed {count} times: see hub.log" for name, count in self._failures.items()]
        return failed + self._floods.in_words(time.monotonic())

    @property
    def names(self) -> Collection[str]:
        return self._services.keys()

    @property
    def held_nbytes(self) -> int:
        """Bytes of all requests that wait or are being handled."""
        return self._queue.held_nbytes

    def _limit(self, peer: str, service: str) -> int:
        """Requests that the server may hold."""
        flooded = self._floods.on_probation(peer, service, time.monotonic())
        return PROBATION_LIMIT if flooded else self._budgets[service].max_pending

    async def _listen(self, peer: str, service: str) -> None:
        """Begins to listen to a peer at a service."""
        await self._stop_listening(peer, service)
        self._received[peer, service] = 0
        await self._subscribe(peer, service, self._limit(peer, service))

    async def _subscribe(self, peer: str, service: str, limit: int) -> None:
        """Lets the server hold this many requests more. Subscriptions share a queue group: each gets other requests."""
        client = self._client
        with suppress(NatsError, OSError):  # without a connection nobody is listened to
            numbers = await client.receive({_subject(peer, service): limit}, self._on_message, queue=HUB)
            if peer in self._subscriptions and client is self._client:
                known = self._subscriptions[peer].get(service, [])
                self._subscriptions[peer][service] = [one for one in known if client.is_receiving(one)] + numbers
            else:
                await client.stop_receiving(numbers)

    async def _stop_listening(self, peer: str, service: str) -> None:
        with suppress(NatsError, OSError):
            await self._client.stop_receiving(self._subscriptions.get(peer, {}).pop(service, []))

    def _on_message(self, subject: str, reply: str, data: bytes) -> None:
        """Queues a request; runs in the client's read loop."""
        kind, peer, *rest = subject.split(".")
        request = Request(peer, rest[0] if rest else kind, data, reply)
        if why := self._queue.arrive(request):
            self._on_dropped(request, why)
        else:
            self._pump_soon()
        self._count(request)

    def _count(self, request: Request) -> None:
        """Lets the server hold more when half of what it may hold has come. If all has come by then, the peer has not
        waited for replies: what it sent beyond is lost."""
        peer, service = request.peer, request.service
        self._received[peer, service] += 1
        room = self._limit(peer, service) // 2
        if self._received[peer, service] < room:
            return
        self._received[peer, service] = 0
        if not any(map(self._client.is_receiving, self._subscriptions.get(peer, {}).get(service, ()))):
            self._on_dropped(request, "more came than the server holds for the hub")
        if not self._floods.is_paused(peer, service, time.monotonic()):
            self._run(self._subscribe(peer, service, room))

    def _on_dropped(self, request: Request, why: str) -> None:
        paused = self._count_as_flood(request, why)
        if not paused and not self._floods.is_paused(request.peer, request.service, time.monotonic()):
            self._run(self._send(request, b"", error_headers(SLOW_DOWN, f"{request.service}: {why}")))

    def _on_refused(self, request: Request) -> None:
        """Whoever goes on with what is refused costs the hub as much as one whose requests are too many."""
        now, budget = time.monotonic(), self._budgets[request.service]
        bucket = self._refused.setdefault((request.peer, request.service), Bucket(budget.of_refused))
        bucket.charge(now, requests=1)
        if bucket.wait_seconds(now) and not self._floods.is_paused(request.peer, request.service, now):
            self._count_as_flood(request, "too many requests were refused")

    def _count_as_flood(self, request: Request, why: str) -> bool:
        """True if the hub does not listen to the peer at this service from now on, for a while."""
        now = time.monotonic()
        peer, service = request.peer, request.service
        seconds = self._floods.on_dropped(peer, service, len(request.data), now)
        if seconds is None:
            return False
        _LOG.warning("%s: requests of %s are dropped for %.0f s (%s)", service, peer, seconds, why)
        self._run(self._pause(peer, service, seconds))
        if text := self._floods.name(peer, service, now):
            self._tell_owner(text)
        return True

    async def _pause(self, peer: str, service: str, seconds: float) -> None:
        """Stops listening for a while. The peer's requests fail at once meanwhile, with "no responders"."""
        client = self._client
        await self._stop_listening(peer, service)
        await asyncio.sleep(seconds)
        if client is self._client and peer in self._subscriptions:
            await self._listen(peer, service)

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Starts waiting requests."""
        self._pumping = False
        for _ in range(_STARTED_PER_TURN):
            request = self._queue.start(time.monotonic())
            if request is None:
                self._pump_later()
                return
            self._run(self._answer(request))
        self._pump_soon()

    def _pump_later(self) -> None:
        seconds = self._queue.wait_seconds(time.monotonic())
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._pump_soon)

    async def _answer(self, request: Request) -> None:
        reply: bytes | None = None
        try:
            reply = await self._services[request.service](request.peer, request.data)
        except ProtocolError as error:
            _LOG.info("%s: request of %s dropped: %s", request.service, request.peer, error)
            await self._send(request, b"", error_headers(INVALID, f"{request.service}: {error}"))
            self._on_refused(request)
        except NotAllowedError as error:
            subject = _subject(request.peer, request.service)
            _LOG.warning("%s: a request of %s was refused: %s", subject, request.peer, error)
            await self._send(request, b"", error_headers(FORBIDDEN, f"{request.service}: {error}"))
            self._on_refused(request)
        except Exception as error:
            self._on_failure(request, error)
            text = f"the hub failed while it handled a request to {request.service}"
            await self._send(request, b"", error_headers(FAILED, text))
        else:
            if reply is not None:
                await self._send(request, reply)
            if isinstance(reply, Refusal):
                self._on_refused(request)
        finally:
            self._queue.done(request, len(reply or b""), time.monotonic())
            self._pump_soon()

    def _on_failure(self, request: Request, error: Exception) -> None:
        """Counts a failure and logs it, with the traceback the first few times."""
        count = self._failures[request.service] = self._failures[request.service] + 1
        often = count & (count - 1)  # 0 for 1, 2, 4, 8 ...: a peer may cause as many as it likes
        what = f"{request.service}: a request of {request.peer} ({len(request.data)} bytes) failed, failure {count}"
        if not often:
            _LOG.error(what, exc_info=error)
        if count == 1:
            self._tell_owner(
                f"the hub's service `{request.service}` failed when {request.peer} asked it ({error!r}). This is a "
                "fault of thinpipe: please report it with the traceback in hub/hub.log. The peer knows it"
            )

    async def _send(self, request: Request, reply: bytes, headers: dict[str, str] | None = None) -> None:
        """Replies to the peer's own inbox; without one, or without a connection, there is nobody to reply to."""
        if request.reply.startswith(f"_INBOX.{request.peer}."):
            with suppress(NatsError, OSError):
                await self._client.publish(request.reply, reply, headers=headers)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _subject(peer: str, service: str) -> str:
    return f"{JOIN}.{peer}" if service == JOIN else f"hub.{peer}.{service}"
