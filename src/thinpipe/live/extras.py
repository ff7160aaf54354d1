"""Says which extra to install when a package is not there."""

from collections.abc import Iterator
from contextlib import contextmanager

from thinpipe.core.errors import UserError


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f'{what} needs {error.name}: pip install "thinpipe[{extra}]"') from None
