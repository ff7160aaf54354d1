"""The step reduction: an all-reduce of small vectors of float64 through the hub, a sum or a comparison. A request is
answered when all peers of the generation have contributed, refused at once if it does not belong to the open round or
when the generation ends, and answered without values after MAX_WAIT_SECONDS, so that the peer repeats it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from thinpipe.core.foreign import decode_foreign
from thinpipe.swarm.hub.step_record import StepRecord
from thinpipe.swarm.protocol.reduction import MAX_VALUES, MAX_WAIT_SECONDS, ReduceOp, ReduceReply, ReduceRequest
from thinpipe.transport.reduction import MAX_NBYTES, reduce_rows

_ROUNDS_KEPT = 2
"""Number of latest rounds whose results are kept for repeated requests. No peer is further behind, because a round
completes only when all peers have requested it."""

Values = npt.NDArray[np.float64]


class ReductionError(Exception):
    """A peer sent a contribution that it must not send now; the text says why."""


class StepReduction:
    """All-reduces of one generation, in numbered rounds. Pure: no I/O, no clock."""

    def __init__(self, generation: int, names: Sequence[str], record: StepRecord | None = None) -> None:
        self.generation, self.completed_rounds = generation, 0
        """`completed_rounds`: number of rounds whose result is known."""
        self._record = record
        self._names = list(names)
        self._contributions: dict[str, tuple[ReduceOp, Values]] = {}
        self._results: dict[int, Values] = {}

    def contribute(self, name: str, generation: int, round_number: int, op: ReduceOp, values: Values) -> None:
        """Adds a peer's values to the open round; a repeated contribution is ignored. Raises ReductionError for
        another generation, round, operation or length."""
        if generation != self.generation or name not in self._names:
            raise ReductionError(f"{name} is not of generation {self.generation}")
        if round_number in self._results:
            return
        if round_number != self.completed_rounds + 1:
            raise ReductionError(f"{name} contributes round {round_number} where {self.completed_rounds + 1} is open")
        if op == "counts" and not ((values >= 0) & (values <= MAX_NBYTES)).all():  # NaN is neither
            self._offend(name, f"{name} announces bytes below 0 or more than the {MAX_NBYTES} allowed")
        if op == "step" and self._record is not None and (refusal := self._record.refuse(name, values)):
            raise ReductionError(refusal)
        for other, (their_op, theirs) in self._contributions.items():
            if (op, len(values)) != (their_op, len(theirs)):
                if self._record is not None:
                    self._record.unlike = name, other
                raise ReductionError(
                    f"round {round_number}: {name} contributes {len(values)} numbers for a {op}, "
                    f"and {other} {len(theirs)} for a {their_op}"
                )
        if len(values) > MAX_VALUES:
            raise ReductionError(f"{name} contributes {len(values)} numbers, more than the {MAX_VALUES} allowed")
        self._contributions.setdefault(name, (op, values))
        if len(self._contributions) == len(self._names):
            self._reduce(round_number, op)

    def result(self, round_number: int) -> Values | None:
        """Reduced values of a round; None: some peers have not contributed."""
        return self._results.get(round_number)

    def _reduce(self, round_number: int, op: ReduceOp) -> None:
        """Reduces in pipeline order, so that the result does not depend on the order of arrival."""
        contributions = {name: self._contributions[name][1] for name in self._names}
        if op == "equal":
            self._refuse_unlike(contributions)
        total = reduce_rows("max" if op == "equal" else "sum", list(contributions.values()))
        self._results[round_number] = total
        if op == "step" and self._record is not None:
            self._record.add(contributions, total)
        self._results.pop(round_number - _ROUNDS_KEPT, None)
        self._contributions, self.completed_rounds = {}, round_number

    def _refuse_unlike(self, contributions: Mapping[str, Values]) -> None:
        """Raises ReductionError unless all are the same bits: against the one that more than half contradict, else
        against two of which one is wrong."""
        groups: dict[bytes, list[str]] = {}
        for name, values in contributions.items():
            groups.setdefault(values.tobytes(), []).append(name)
        if len(groups) == 1:
            return
        most, *others = sorted(groups.values(), key=len, reverse=True)
        what = f"{others[0][0]} has another basis or other fixed tables than {most[0]}"
        if 2 * len(most) > len(contributions):
            self._offend(others[0][0], what)
        if self._record is not None:
            self._record.unlike = others[0][0], most[0]
        raise ReductionError(what)

    def _offend(self, name: str, what: str) -> NoReturn:
        if self._record is not None and self._record.offence is None:
            self._record.offence = name, what
        raise ReductionError(what)


class ReductionService:
    """Serves `reduce` requests for the running generation."""

    def __init__(self) -> None:
        self._reduction: StepReduction | None = None
        self._end_reason = "nothing is computed now"
        self._changed = asyncio.Condition()

    async def begin(self, generation: int, names: Sequence[str], record: StepRecord) -> None:
        """Starts round 1 of a generation. `names`: its peers in pipeline order. `record` sees the vectors of its
        steps."""
        await self._set(StepReduction(generation, names, record))

    async def end(self, why: str) -> None:
        """Answers all waiting requests with a refusal that gives this reason."""
        self._end_reason = why
        await self._set(None)

    async def _set(self, reduction: StepReduction | None) -> None:
        """Replaces the reduction without awaiting first: a peer may contribute as soon as it has its assignment."""
        self._reduction = reduction  # before any await, see above
        async with self._changed:
            self._changed.notify_all()

    async def __call__(self, peer: str, data: bytes) -> bytes | None:
        request = decode_foreign(data, ReduceRequest)
        values = np.frombuffer(request.values, "<f8")
        return msgspec.msgpack.encode(await self._answer(peer, request, values))

    async def _answer(self, peer: str, request: ReduceRequest, values: np.ndarray) -> ReduceReply:
        """Contributes the values and waits up to `MAX_WAIT_SECONDS` for the result."""
        reduction = self._reduction
        if reduction is None:
            return ReduceReply(refusal=self._end_reason)
        async with self._changed:
            try:
                reduction.contribute(peer, request.generation, request.round_number, request.op, values)
            except ReductionError as error:
                return ReduceReply(refusal=str(error))
            self._changed.notify_all()

            def is_settled() -> bool:
                return self._reduction is not reduction or reduction.result(request.round_number) is not None

            try:
                async with asyncio.timeout(MAX_WAIT_SECONDS):
                    await self._changed.wait_for(is_settled)
            except TimeoutError:
                return ReduceReply()
        found = reduction.result(request.round_number)
        return ReduceReply(refusal=self._end_reason) if found is None else ReduceReply(values=found.tobytes())
