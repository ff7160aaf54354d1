"""`thinpipe train`: trains, and turns the way a run ended into an exit code. Also a process that `train` launches."""

import sys

from thinpipe.config.run import RunConfig
from thinpipe.core.errors import RunFailedError
from thinpipe.training.launch import train
from thinpipe.training.observer import FAILED, Observer


def run(config: RunConfig) -> int:
    """Exit code: 0, also after a signal, 1 if the run failed, 2 for a user error that a process of a group has
    reported."""
    observer = Observer()
    try:
        train(config, observer)
        return 1 if observer.stop_reason in FAILED else 0
    except RunFailedError as error:
        if not error.reported:
            print(f"thinpipe: {error}", file=sys.stderr)
        return 2 if error.user_error else 1
