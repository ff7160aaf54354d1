"""How thinpipe is installed, in one place: the repository, PyTorch's package index, and one line for each system.

There is no release yet, so lines install from the repository, which needs git.
"""

from importlib.metadata import PackageNotFoundError, metadata

TORCH_INDEX = "https://download.pytorch.org/whl"
TORCH_CUDA = "cu130"
"""Folder of `TORCH_INDEX` for NVIDIA's cards: https://pytorch.org/get-started/locally says which there are."""
NEEDS = "Python 3.11 to 3.13 and git"
_REPOSITORY = "https://github.com/thinpipe/thinpipe"
_FOLDER = "thinpipe-env"
"""Environment in the home folder that the lines make."""


def repository_url() -> str:
    """The repository that the package names ([project.urls] of pyproject.toml), else the one known here."""
    try:
        named = metadata("thinpipe").get_all("Project-URL") or []
    except PackageNotFoundError:  # run from a clone that is not installed
        named = []
    urls = [line.removeprefix("Homepage, ") for line in named if line.startswith("Homepage, ")]
    return str(urls[0]) if urls else _REPOSITORY


def requirement(extra: str) -> str:
    """What pip installs, with an extra."""
    return f"thinpipe[{extra}] @ git+{repository_url()}"


def install_and_join(invite: str) -> dict[str, str]:
    """A line for a new terminal that installs thinpipe and joins with an invite, by name of the system. Each may be
    used again. Without a card of NVIDIA, Linux gets PyTorch's small build; with one, Windows gets the build for it."""
    what, small = requirement("swarm"), f"--extra-index-url={TORCH_INDEX}/cpu"
    unix, windows = f"~/{_FOLDER}/bin", f"$HOME\\{_FOLDER}\\Scripts"
    make, join = f"python3 -m venv ~/{_FOLDER}", f"{unix}/thinpipe join '{invite}'"
    build = f"$(command -v nvidia-smi >/dev/null || echo {small})"
    card = f"@(if (Get-Command nvidia-smi -ErrorAction Ignore) {{'--extra-index-url={TORCH_INDEX}/{TORCH_CUDA}'}})"
    return {
        "Linux": f"{make} && {unix}/pip install {build} '{what}' && {join}",
        "macOS": f"{make} && {unix}/pip install '{what}' && {join}",
        "Windows (PowerShell)": (
            f"py -3 -m venv $HOME\\{_FOLDER}; if ($?) {{ & {windows}\\pip install {card} '{what}'; "
            f"if ($?) {{ & {windows}\\thinpipe join '{invite}' }} }}"
        ),
    }
