"""Measures the link of the holder of an invite before joining, without using up the invite."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Self

import msgspec
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError

from thinpipe.core.foreign import decode_foreign
from thinpipe.core.numerics import Numerics
from thinpipe.swarm.peer.accept_invite import connect_as_invited
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.messages import InviteCheck, InviteState

_LEAVE_SECONDS = 5.0


class InviteProbe:
    """Context manager with the `submit` of `HubConnection`; every request goes to the hub's `Admission`. Raises
    UserError when the broker rejects the invite."""

    def __init__(self, invite: Invite) -> None:
        self._invite, self._loop = invite, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="invite-probe", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._client = asyncio.run_coroutine_threadsafe(connect_as_invited(self._invite), self._loop).result()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(_LEAVE_SECONDS)
        finally:
            self._end()

    def submit(self, service: str, data: bytes, *, seconds: float, bulk: bool = False) -> Future[bytes]:  # noqa: ARG002
        return asyncio.run_coroutine_threadsafe(self._request(data, seconds), self._loop)

    def check(self, seconds: float, numerics: Numerics | None = None) -> InviteState:
        """Whether the invite can be used now or, with `numerics`, whether a machine that has these could take part; and
        the hub's clock."""
        question = msgspec.msgpack.encode(InviteCheck(numerics=numerics))
        reply = asyncio.run_coroutine_threadsafe(self._request(question, seconds), self._loop).result(seconds + 5)
        return decode_foreign(reply, InviteState)

    async def _request(self, data: bytes, seconds: float) -> bytes:
        try:
            answer = await self._client.request(f"join.{self._invite.id}", data, timeout=seconds)
        except NatsTimeoutError:
            raise TimeoutError(f"the hub did not answer within {seconds:g} s") from None
        except NatsError as error:
            raise ConnectionError(f"the hub could not be asked: {error}") from error
        return answer.data

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LEAVE_SECONDS)
        self._loop.close()
