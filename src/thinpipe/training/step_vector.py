"""Layout of the one vector that all processes sum at the end of a step: which number is where, by name.

Except for counts of stop requests, each number is non-zero in one process at most, so the sum is exact. Processes and
hub derive the layout from the model and the number of processes, so that the vector carries no names.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from thinpipe.pipeline.message_figures import BoundaryDirection

LOSS = "loss"
STOPS = "stops"
GRADIENT_NORMS = "gradient_norms"
TRAINED_TOKENS = "trained_tokens"
"""Number of tokens of the batch that are trained on, from the process with the loss. Of chats only: otherwise it has no
place in the vector."""
PER_BOUNDARY_SENDER = ("sent_rms", "sent_mean")
"""Numbers of each boundary and direction, from the process that sends: what it is about to encode."""
PER_BOUNDARY_DIRECTION = ("not_finite", "outliers", "received_rms", "received_mean", "nbytes", "waited_seconds")
"""Numbers of each boundary and direction, from the process that receives: bad messages by kind, what it has decoded,
bytes, and seconds in which it waited for them."""
PER_PROCESS = ("seconds", "idle_seconds", "peak_nbytes")
"""Numbers of each process: seconds of the pipeline run, those of them spent waiting, and peak memory."""


class StepVector:
    """Layout of the vector for these parameters (their names, in layer order), boundaries and processes.

    `batch_tokens`: number of tokens of a batch of chats, by which the loss and the gradients of every process are
    divided; read here, they are divided by the number of trained tokens instead. None: plain text, all are trained on.
    """

    def __init__(
        self, parameters: Sequence[str], *, boundaries: int, processes: int, batch_tokens: int | None = None
    ) -> None:
        self.parameters = list(parameters)
        self.ends = [(boundary, forward) for boundary in range(boundaries) for forward in (True, False)]
        """Order of the numbers of each boundary and direction."""
        self.processes, self.batch_tokens = processes, batch_tokens
        lengths = {GRADIENT_NORMS: len(self.parameters), LOSS: 1, STOPS: 1}
        lengths[TRAINED_TOKENS] = 0 if batch_tokens is None else 1
        of_ends = dict.fromkeys((*PER_BOUNDARY_SENDER, *PER_BOUNDARY_DIRECTION), len(self.ends))
        lengths |= of_ends | dict.fromkeys(PER_PROCESS, processes)
        stops = list(accumulate(lengths.values()))
        self.parts = {
            name: slice(stop - length, stop) for (name, length), stop in zip(lengths.items(), stops, strict=True)
        }
        """Where the numbers of each part are, by name of the part."""
        self.size = stops[-1]

    def pack(
        self,
        *,
        loss: float,
        stops: float,
        gradient_norms: Mapping[str, float],
        of_ends: Mapping[str, Mapping[BoundaryDirection, float]],
        of_process: Mapping[str, float],
        rank: int,
        trained_tokens: int = 0,
    ) -> list[float]:
        """What the process `rank` contributes: its own numbers by part, 0 where it has none."""
        numbers = [0.0] * self.size
        numbers[self.parts[LOSS]], numbers[self.parts[STOPS]] = [loss], [stops]
        numbers[self.parts[GRADIENT_NORMS]] = [gradient_norms.get(name, 0.0) for name in self.parameters]
        if self.batch_tokens is not None:
            numbers[self.parts[TRAINED_TOKENS]] = [float(trained_tokens)]
        for part, values in of_ends.items():
            numbers[self.parts[part]] = [values.get(end, 0.0) for end in self.ends]
        for part, value in of_process.items():
            numbers[self.parts[part].start + rank] = value
        return numbers

    def scale(self, numbers: Sequence[float]) -> float:
        """What loss and gradients of the processes have to be multiplied by (`trained_scale`); 1 for plain text."""
        if self.batch_tokens is None:
            return 1.0
        return trained_scale(numbers[self.parts[TRAINED_TOKENS].start], self.batch_tokens)

    def loss(self, numbers: Sequence[float]) -> float:
        return numbers[self.parts[LOSS].start] * self.scale(numbers)

    def stops(self, numbers: Sequence[float]) -> float:
        """Number of processes that were asked to stop."""
        return numbers[self.parts[STOPS].start]

    def gradient_norms(self, numbers: Sequence[float]) -> dict[str, float]:
        """By parameter, in layer order."""
        scale = self.scale(numbers)
        norms = [norm * scale for norm in numbers[self.parts[GRADIENT_NORMS]]]
        return dict(zip(self.parameters, norms, strict=True))

    def of_ends(self, part: str, numbers: Sequence[float]) -> dict[BoundaryDirection, float]:
        """The numbers of a part in `PER_BOUNDARY_DIRECTION` or `PER_BOUNDARY_SENDER`."""
        return dict(zip(self.ends, numbers[self.parts[part]], strict=True))

    def of_processes(self, part: str, numbers: Sequence[float]) -> list[float]:
        """The numbers of a part in `PER_PROCESS`, in the order of the processes."""
        return list(numbers[self.parts[part]])


def trained_scale(trained_tokens: float, tokens: int) -> float:
    """From a mean over all tokens to a mean over those that are trained on: tokens / trained_tokens.

    0 if none is, whose loss and gradients are 0. NaN if this is not a number of tokens, as another process may say:
    the step is then a bad one.
    """
    if trained_tokens == 0:
        return 0.0
    return tokens / trained_tokens if 1 <= trained_tokens <= tokens else math.nan
