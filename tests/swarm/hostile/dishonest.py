"""A dishonest peer program: a real `thinpipe join` in which chosen functions are replaced before it starts.

`python -m tests.swarm.hostile.dishonest MODULE:LIE join INVITE ...` imports MODULE, calls LIE, which replaces what it
likes with `replace`, and then runs the command line. The fixture `join_dishonestly` starts one. The program trains,
saves and uploads as an honest one where the lie lets it.
"""

import importlib
import sys
from functools import wraps


def replace(owner, name, lie):
    """`lie` takes the place of the function or method `owner.name`: it is called with the honest one, then with the
    arguments."""
    honest = getattr(owner, name)

    @wraps(honest)
    def lying(*arguments, **more):
        return lie(honest, *arguments, **more)

    setattr(owner, name, lying)


def main(lie, *arguments):
    from thinpipe.cli import main

    module, _, function = lie.partition(":")
    getattr(importlib.import_module(module), function)()
    return main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
