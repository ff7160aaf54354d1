"""Serves the ballot of the current epoch: a vote is answered when all are in, or the epoch is over."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np

from thinpipe.swarm.ballot import Ballot, Kind, VoteError
from thinpipe.swarm.reading import read

SERVICE = "vote"
MOST_WAIT_SECONDS = 20.0
"""Then the peer is told to ask again, so that it knows that the hub is there."""


class Vote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    epoch: int
    number: int
    """Of the round, from 1."""
    kind: Kind
    numbers: bytes
    """float64, little-endian."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    numbers: bytes | None = None
    """None: ask again."""
    refusal: str = ""


_VOTES = msgspec.msgpack.Decoder(Vote)


class VoteService:
    def __init__(self) -> None:
        self._ballot: Ballot | None = None
        self._why = "nothing is computed now"
        self._changed = asyncio.Condition()

    async def begin(self, epoch: int, names: Sequence[str]) -> None:
        await self._set(Ballot(epoch, names))

    async def end(self, why: str) -> None:
        self._why = why
        await self._set(None)

    async def _set(self, ballot: Ballot | None) -> None:
        self._ballot = ballot  # at once: whoever is told to work may vote
        async with self._changed:
            self._changed.notify_all()

    async def __call__(self, peer: str, data: bytes) -> bytes | None:
        vote = read(_VOTES, data)
        if vote is None or len(vote.numbers) % 8:
            return None
        numbers = np.frombuffer(vote.numbers, "<f8")
        return msgspec.msgpack.encode(await self._answer(peer, vote, numbers))

    async def _answer(self, peer: str, vote: Vote, numbers: np.ndarray) -> Decision:
        ballot = self._ballot
        if ballot is None:
            return Decision(refusal=self._why)
        async with self._changed:
            try:
                ballot.give(peer, vote.epoch, vote.number, vote.kind, numbers)
            except VoteError as error:
                return Decision(refusal=str(error))
            self._changed.notify_all()

            def settled() -> bool:
                return self._ballot is not ballot or ballot.decision(vote.number) is not None

            try:
                async with asyncio.timeout(MOST_WAIT_SECONDS):
                    await self._changed.wait_for(settled)
            except TimeoutError:
                return Decision()
        found = ballot.decision(vote.number)
        return Decision(refusal=self._why) if found is None else Decision(numbers=found.tobytes())
