"""Optional dependencies (extras): checks whether they are installed, without importing them."""

from importlib.util import find_spec

from thinpipe.core.errors import UserError


def require_extra(module: str, *, extra: str, feature: str) -> None:
    """Raises UserError if the optional library `module` is missing; call it before importing the library.

    `feature`: what needs the library, as the subject of the message; `extra`: name of the pip extra.
    """
    if find_spec(module) is None:
        raise UserError(f"{feature} needs {module}: {install_hint(extra)}")


def install_hint(extra: str) -> str:
    """The pip command that installs an extra, for an installed package and for a repository clone."""
    return f'pip install "thinpipe[{extra}]" (in a clone: pip install -e ".[{extra}]")'
