"""Libraries that not everybody needs: whether they are here, and how to get them. Imports none of them."""

from importlib.util import find_spec

from thinpipe.core.errors import UserError


def need(module: str, *, extra: str, what: str) -> None:
    """Call before importing an optional library: `what` is what cannot be done without it."""
    if find_spec(module) is None:
        raise UserError(f"{what} needs {module}: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """One line for a person to copy, and its form for who works in a clone."""
    return f'pip install "thinpipe[{extra}]" (in a clone: pip install -e ".[{extra}]")'
