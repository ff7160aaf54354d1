"""The store in which processes meet, kept by the hub: torch's TCPStore without a port of its own."""

from datetime import timedelta
from time import monotonic
from typing import Literal

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from thinpipe.transport.nats.post import Post
from thinpipe.transport.nats.requests import SERVICE, Answered, Asked

_DECODER = msgspec.msgpack.Decoder(Answered)


class NatsStore(Store):
    """Every wait ends: `timeout` holds for each call."""

    def __init__(self, post: Post, timeout: timedelta) -> None:
        super().__init__()
        self._post, self._limit = post, timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Asked(what="set", keys=[key], value=_bytes(value)))

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        return self._await("get", [key], self._limit).value

    def add(self, key: str, amount: int) -> int:
        return self._ask(Asked(what="add", keys=[key], amount=amount)).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        asked = Asked(what="swap", keys=[key], expected=_bytes(expected), value=_bytes(desired))
        return self._ask(asked).value

    def check(self, keys: list[str]) -> bool:
        return self._ask(Asked(what="wait", keys=list(keys))).found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await("wait", list(keys), timeout or self._limit)

    def delete_key(self, key: str) -> bool:
        return self._ask(Asked(what="delete", keys=[key])).found

    def num_keys(self) -> int:
        return self._ask(Asked(what="count")).number

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def _await(self, what: Literal["get", "wait"], keys: list[str], limit: timedelta) -> Answered:
        """The hub also ends a wait when those who would have set the keys are gone."""
        began = monotonic()
        answer = self._ask(Asked(what=what, keys=keys, wait_seconds=limit.total_seconds()))
        if not answer.found:
            raise dist.DistStoreError(f"waited {monotonic() - began:.1f} s for {', '.join(keys)} in the hub's store")
        return answer

    def _ask(self, asked: Asked) -> Answered:
        began = monotonic()
        try:
            data = self._post.request(SERVICE, msgspec.msgpack.encode(asked), seconds=asked.wait_seconds + 10)
        except Exception as error:
            raise dist.DistStoreError(
                f"the hub did not answer within {monotonic() - began:.0f} s: {error!r}"
            ) from error
        return _DECODER.decode(data)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
