"""What a set of requirements comes to: every library of this environment that it needs, directly or through others.

    python -m tests.packaging.libraries

writes known-good.txt, the versions of what thinpipe and its users' extras need, from those that CI installs.
"""

import tomllib
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.readme.pages import ROOT, read

LEFT_OUT = {"dev", "docs", "notebooks", "wandb"}
"""Extras of those who work on thinpipe, and wandb, which CI does not install."""
HEAD = (
    "# Versions with which the tests last passed, of all libraries that users install (but for wandb):\n"
    '#   pip install -c known-good.txt -e ".[swarm]"\n'
    "# Made from .ci/constraints.txt by `python -m tests.packaging.libraries`.\n"
)


def needed(requirements, *, extras=()):
    """Canonical names; markers are those of this machine."""
    names, left = set(), [(Requirement(text), frozenset(extras)) for text in requirements]
    done = set()
    while left:
        wanted, context = left.pop()
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": extra}) for extra in context | {""}):
            continue
        name = canonicalize_name(wanted.name)
        names.add(name)
        if name == "thinpipe" or (name, frozenset(wanted.extras)) in done:
            continue
        done.add((name, frozenset(wanted.extras)))
        left += [(Requirement(text), frozenset(wanted.extras)) for text in distribution(name).requires or ()]
    return names - {"thinpipe"}


def users_requirements():
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(text for name in sorted(set(extras) - LEFT_OUT) for text in extras[name])]


def constraints():
    """Canonical name -> line of .ci/constraints.txt."""
    lines = [line for line in read(ROOT / ".ci/constraints.txt").splitlines() if not line.startswith("#")]
    return {canonicalize_name(line.partition("==")[0]): line for line in lines}


def known_good():
    pinned = constraints()
    return HEAD + "".join(f"{pinned[name]}\n" for name in sorted(needed(users_requirements())) if name in pinned)


if __name__ == "__main__":
    (ROOT / "known-good.txt").write_text(known_good(), encoding="utf-8")
