"""Key-value store with blocking reads, used as the rendezvous of a process group (like torch's `Store`)."""

import asyncio

import msgspec

from thinpipe.core.foreign import decode_foreign
from thinpipe.transport.nats.store_messages import StoreReply, StoreRequest

MAX_KEYS, MAX_VALUE_NBYTES = 10_000, 4096
"""Limits of the store: it is for rendezvous, not for bulk data."""
MAX_WAIT_SECONDS = 3600.0
"""Maximum seconds that a `get` or `wait` blocks."""

_MAX_DIGITS = 18
"""Digits from which a stored number is no longer taken as one."""


class StoreService:
    """Serves store requests. Requests run concurrently: a blocked one does not delay others."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()
        self._wakeups = 0
        """Number of calls of `wake_all_waiters`."""

    async def __call__(self, peer: str, data: bytes) -> bytes | None:  # noqa: ARG002  all peers share it
        return msgspec.msgpack.encode(await self._answer(decode_foreign(data, StoreRequest)))

    def clear(self) -> None:
        """Removes all keys, at the start of a generation."""
        self._values.clear()

    async def wake_all_waiters(self) -> None:
        """Ends all blocked reads with "not found": the peers that they wait for will not come."""
        self._wakeups += 1
        async with self._changed:
            self._changed.notify_all()

    async def _answer(self, request: StoreRequest) -> StoreReply:
        if request.what == "count":
            return StoreReply(found=True, number=len(self._values))
        if request.what in ("get", "wait"):
            return await self._await(request)
        async with self._changed:
            answer = self._apply(request)
            self._changed.notify_all()
        return answer

    async def _await(self, request: StoreRequest) -> StoreReply:
        """Blocks until all keys exist, the timeout has passed or the waiters are woken."""
        ended = self._wakeups

        def all_present() -> bool:
            return all(key in self._values for key in request.keys)

        async with self._changed:
            try:
                async with asyncio.timeout(min(request.wait_seconds, MAX_WAIT_SECONDS)):
                    await self._changed.wait_for(lambda: all_present() or self._wakeups != ended)
            except TimeoutError:
                pass
            if not all_present():
                return StoreReply(found=False)
            value = self._values[request.keys[0]] if request.what == "get" else b""
            return StoreReply(found=True, value=value)

    def _apply(self, request: StoreRequest) -> StoreReply:
        """Executes a non-blocking write: delete, set, add or compare-and-set."""
        (key,) = request.keys
        known = self._values.get(key)
        too_much = len(request.value) > MAX_VALUE_NBYTES or (known is None and len(self._values) >= MAX_KEYS)
        if request.what == "delete":
            return StoreReply(found=self._values.pop(key, None) is not None)
        if too_much:
            return StoreReply(found=False)
        if request.what == "set":
            self._values[key] = request.value
            return StoreReply(found=True)
        if request.what == "add":
            number = _number(known) + request.amount
            self._values[key] = str(number).encode()
            return StoreReply(found=True, number=number)
        if (known or b"") == request.expected:
            self._values[key] = request.value
        return StoreReply(found=True, value=self._values.get(key, request.expected))


def _number(value: bytes | None) -> int:
    """The stored counter; 0 if there is none or the value is not a number."""
    digits = (value or b"").removeprefix(b"-")
    return int(value or b"") if digits.isdigit() and len(digits) < _MAX_DIGITS else 0
