"""The store in which processes meet: a dictionary that can be waited for."""

import asyncio

import msgspec

from thinpipe.transport.nats.requests import Answered, Asked

MOST_KEYS, MOST_VALUE_NBYTES, MOST_WAIT_SECONDS = 100_000, 1 << 20, 3600.0

_DECODER = msgspec.msgpack.Decoder(Asked)


class StoreService:
    """Requests are answered in any order; one that waits holds up no other."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def __call__(self, peer: str, data: bytes) -> bytes | None:  # noqa: ARG002  all peers share it
        try:
            asked = _DECODER.decode(data)
        except msgspec.DecodeError:
            return None
        return msgspec.msgpack.encode(await self._answer(asked))

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
        def there() -> bool:
            return all(key in self._values for key in asked.keys)

        async with self._changed:
            try:
                async with asyncio.timeout(min(asked.wait_seconds, MOST_WAIT_SECONDS)):
                    await self._changed.wait_for(there)
            except TimeoutError:
                return Answered(found=there())
            value = self._values[asked.keys[0]] if asked.what == "get" else b""
            return Answered(found=True, value=value)

    def _change(self, asked: Asked) -> Answered:
        (key,) = asked.keys or [""]
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
            number = (int(known) if known else 0) + asked.amount
            self._values[key] = str(number).encode()
            return Answered(found=True, number=number)
        if (known or b"") == asked.expected:
            self._values[key] = asked.value
        return Answered(found=True, value=self._values.get(key, asked.expected))
