"""A peer that computes as it should and lies in the sums of the steps: `python -m tests.swarm.hostile.liar join ...` is
`thinpipe join ...`. The environment variable LIE names the lie."""

import math
import os
import sys

from thinpipe.cli import main
from thinpipe.swarm.peer.hub_collectives import HubCollectives
from thinpipe.training.engine import Engine
from thinpipe.training.step_vector import GRADIENT_NORMS


def not_finite(engine, numbers):
    """One of its gradients is not finite."""
    own = next(index for index, name in enumerate(engine.names) if name in engine.parameters)
    numbers[own] = math.nan


def foreign(engine, numbers):
    """It adds to the gradient norms of the others, so that all clip their gradients to nothing."""
    for index in range(engine.step_vector.parts[GRADIENT_NORMS].stop):
        numbers[index] += 1e9


def finds(engine, numbers):
    """It finds bad values in all that it has received."""
    parts = engine.step_vector.parts
    received = [number > 0 for number in numbers[parts["nbytes"]]]
    numbers[parts["not_finite"]] = list(map(float, received))


def lie_in_collectives(op, lie):
    """In the sums of this kind, apart from those of the steps."""
    honest = HubCollectives._all_reduce

    def all_reduce(self, kind, numbers):
        return honest(self, kind, lie(numbers) if kind == op else numbers)

    HubCollectives._all_reduce = all_reduce


def other_basis(numbers):
    """The hash of its basis is another one."""
    return [number + 1 for number in numbers]


def no_length(numbers):
    """The lengths of what it announces are no numbers."""
    return [math.nan] * len(numbers)


COLLECTIVE_LIES = {"other_basis": ("equal", other_basis), "no_length": ("counts", no_length)}
LIES = {lie.__name__: lie for lie in (not_finite, foreign, finds)}


def lie_in_sums(lie):
    honest = Engine._contribution

    def contribution(self, *arguments, **keywords):
        numbers = honest(self, *arguments, **keywords)
        lie(self, numbers)
        return numbers

    Engine._contribution = contribution


if __name__ == "__main__":
    named = os.environ["LIE"]
    if named in LIES:
        lie_in_sums(LIES[named])
    else:
        lie_in_collectives(*COLLECTIVE_LIES[named])
    sys.exit(main(sys.argv[1:]))
