"""What lossy boundaries do to a small ResNet cut in four: the image task of arXiv 2401.07788, on digits.

    pip install -e ".[dev]"
    python -m benchmarks.images list
    python -m benchmarks.images run --output benchmarks/results/images
    python -m benchmarks.images report --output benchmarks/results/images

Every training has the same data order, first weights, optimiser and number of steps for a seed; what differs is what
crosses the boundaries. Each is tested twice, with its compression and without. Stop `run` at any time and start it
again: finished trainings are not repeated. `report` writes images.md and images.png from the lines of images.jsonl.
"""

import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.images.execute import SEEDS, Task, execute, read, tasks
from benchmarks.images.report import report
from benchmarks.images.training import Recipe
from thinpipe.core.errors import UserError


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "run", "report"))
    parser.add_argument("--output", type=Path, default=Path("runs/images"))
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--only", nargs="*", default=(), help="parts of the names of settings")
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    parser.add_argument("--side-by-side", type=int, default=2)
    options = parser.parse_args()
    recipe, wanted = Recipe(epochs=options.epochs), tasks(options.seeds, options.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no training is left behind
    try:
        if options.what == "run":
            execute(wanted, recipe, options.output, side_by_side=options.side_by_side)
        elif options.what == "report":
            report(read(options.output, recipe), recipe, options.output)
        else:
            print_list(wanted, options.output, recipe)
    except UserError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def print_list(wanted: Sequence[Task], output: Path, recipe: Recipe) -> None:
    done = {(outcome.setting, outcome.seed) for outcome in read(output, recipe)}
    for task in wanted:
        print(f"{'done' if task in done else 'open'}  seed {task[1]}  {task[0].name}")


if __name__ == "__main__":
    main()
