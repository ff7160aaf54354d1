"""What the peers of `thinpipe bench chaos` run: the command `thinpipe`, with a signal that spoils a message.

So the command itself has no such door.
"""

import importlib
import importlib.util
import runpy

POISON = "thinpipe.bench.chaos_poison"


def can_poison() -> bool:
    return importlib.util.find_spec(POISON) is not None


if __name__ == "__main__":
    if can_poison():
        importlib.import_module(POISON).poison_when_asked()
    runpy.run_module("thinpipe", run_name="__main__", alter_sys=True)
