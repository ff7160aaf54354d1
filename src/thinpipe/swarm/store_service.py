"""The store in which processes meet: a dictionary that can be waited for."""

import asyncio

import msgspec

from thinpipe.swarm.reading import read
from thinpipe.transport.nats.requests import Answered, Asked

MOST_KEYS, MOST_KEY_CHARACTERS, MOST_VALUE_NBYTES = 10_000, 200, 4096
"""Processes meet here; they send each other nothing large this way."""
MOST_KEYS_AT_ONCE = 1000
MOST_WAIT_SECONDS = 3600.0

_MOST_DIGITS = 18
_DECODER = msgspec.msgpack.Decoder(Asked)


class StoreService:
    """Requests are answered in any order; one that waits holds up no other."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()
        self._ended = 0
        """How often all who waited were sent away."""

    async def __call__(self, peer: str, data: bytes) -> bytes | None:  # noqa: ARG002  all peers share it
        asked = read(_DECODER, data)
        if asked is None or not _makes_sense(asked):
            return None
        return msgspec.msgpack.encode(await self._answer(asked))

    def clear(self) -> None:
        """What earlier epochs have left is of no use to the next."""
        self._values.clear()

    async def send_away(self) -> None:
        """All who wait: those for whom they do will not come."""
        self._ended += 1
        async with self._changed:
            self._changed.notify_all()

    async def _answer(self, asked: Asked) -> Answered:
        if asked.what == "count":
            return Answered(found=True, number=len(self._values))
        if asked.what in ("get", "wait"):
            return await self._await(asked)
        async with self._changed:
            answer = self._change(asked)
            self._changed.notify_all()
        return answer

    async def _await(self, asked: Asked) -> Answered:
        ended = self._ended

        def there() -> bool:
            return all(key in self._values for key in asked.keys)

        async with self._changed:
            try:
                async with asyncio.timeout(min(asked.wait_seconds, MOST_WAIT_SECONDS)):
                    await self._changed.wait_for(lambda: there() or self._ended != ended)
            except TimeoutError:
                pass
            if not there():
                return Answered(found=False)
            value = self._values[asked.keys[0]] if asked.what == "get" else b""
            return Answered(found=True, value=value)

    def _change(self, asked: Asked) -> Answered:
        (key,) = asked.keys
        known = self._values.get(key)
        too_much = len(asked.value) > MOST_VALUE_NBYTES or (known is None and len(self._values) >= MOST_KEYS)
        if asked.what == "delete":
            return Answered(found=self._values.pop(key, None) is not None)
        if too_much:
            return Answered(found=False)
        if asked.what == "set":
            self._values[key] = asked.value
            return Answered(found=True)
        if asked.what == "add":
            number = _number(known) + asked.amount
            self._values[key] = str(number).encode()
            return Answered(found=True, number=number)
        if (known or b"") == asked.expected:
            self._values[key] = asked.value
        return Answered(found=True, value=self._values.get(key, asked.expected))


def _makes_sense(asked: Asked) -> bool:
    keys = len(asked.keys)
    wanted = {"wait": 0 < keys <= MOST_KEYS_AT_ONCE, "count": keys == 0}.get(asked.what, keys == 1)
    return wanted and all(len(key) <= MOST_KEY_CHARACTERS for key in asked.keys)


def _number(value: bytes | None) -> int:
    """What was counted before; text that is no number counts as nothing."""
    digits = (value or b"").removeprefix(b"-")
    return int(value or b"") if digits.isdigit() and len(digits) < _MOST_DIGITS else 0
