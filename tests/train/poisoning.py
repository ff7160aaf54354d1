"""A process that sends bad values at the places that POISON names: a list of [step, boundary, forward, times, value].

`python -m tests.train.poisoning train ...` is `thinpipe train ...`. One with rank RANK has its own: POISON_RANK.
"""

import json
import os
import sys

from benchmarks.chaos.poison import poison
from thinpipe.cli import main


def planned(plan):
    """Poisons the first message that the plan names, in so many tries of its step."""
    left = {(step, boundary, forward): [times, value] for step, boundary, forward, times, value in plan}

    def choose(place):
        entry = left.get((place.step, place.boundary, place.forward))
        if place.microbatch or entry is None or not entry[0]:
            return None
        entry[0] -= 1
        return float(entry[1])

    return choose


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == os.environ["POISON_RANK"]:
        poison(planned(json.loads(os.environ["POISON"])))
    sys.exit(main(sys.argv[1:]))
