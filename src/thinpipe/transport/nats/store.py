"""c10d Store for the rendezvous of peers, kept by the hub: like torch's TCPStore, without a separate port."""

from datetime import timedelta
from time import monotonic
from typing import Literal

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from thinpipe.core.foreign import decode_foreign
from thinpipe.transport.nats.connection import HubConnection
from thinpipe.transport.nats.store_messages import SERVICE, StoreReply, StoreRequest


class NatsStore(Store):
    """Client of the hub's store. Waits end after `timeout` at most. Failures raise DistStoreError."""

    def __init__(self, connection: HubConnection, timeout: timedelta) -> None:
        super().__init__()
        self._connection, self._limit = connection, timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._write(StoreRequest(what="set", keys=[key], value=_bytes(value)))

    def get(self, key: str) -> bytes:
        """Waits for the key and returns its value."""
        return self._await("get", [key], self._limit).value

    def add(self, key: str, amount: int) -> int:
        return self._write(StoreRequest(what="add", keys=[key], amount=amount)).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        request = StoreRequest(what="swap", keys=[key], expected=_bytes(expected), value=_bytes(desired))
        return self._write(request).value

    def check(self, keys: list[str]) -> bool:
        return self._ask(StoreRequest(what="wait", keys=list(keys))).found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await("wait", list(keys), timeout or self._limit)

    def delete_key(self, key: str) -> bool:
        return self._ask(StoreRequest(what="delete", keys=[key])).found

    def num_keys(self) -> int:
        return self._ask(StoreRequest(what="count")).number

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def _await(self, what: Literal["get", "wait"], keys: list[str], limit: timedelta) -> StoreReply:
        """Waits until all keys are set. The hub ends the wait early when the peers that would set them are gone."""
        began = monotonic()
        answer = self._ask(StoreRequest(what=what, keys=keys, wait_seconds=limit.total_seconds()))
        if not answer.found:
            raise dist.DistStoreError(f"waited {monotonic() - began:.1f} s for {', '.join(keys)} in the hub's store")
        return answer

    def _write(self, request: StoreRequest) -> StoreReply:
        """Executes a write. Raises DistStoreError if the hub refuses it: the other peers would wait for the key."""
        answer = self._ask(request)
        if not answer.found:
            raise dist.DistStoreError(
                f"the hub's store refused {request.keys[0]!r} with {len(request.value)} bytes: the value is too long, "
                "the store is full, or the generation has ended"
            )
        return answer

    def _ask(self, request: StoreRequest) -> StoreReply:
        began = monotonic()
        try:
            data = self._connection.request(SERVICE, msgspec.msgpack.encode(request), seconds=request.wait_seconds + 10)
            return decode_foreign(data, StoreReply)
        except Exception as error:
            raise dist.DistStoreError(
                f"the hub did not answer within {monotonic() - began:.0f} s: {error!r}"
            ) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
