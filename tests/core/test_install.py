"""One line for each system that installs thinpipe and joins: read by that system's own shell where there is one."""

import shlex
import subprocess

import pytest

from thinpipe.core.install import install_and_join, repository_url, requirement

INVITE = "thinpipe3:" + "aB9-_" * 60
LINES = install_and_join(INVITE)


def test_the_repository_is_named_in_one_place():
    assert repository_url().startswith("https://")
    assert requirement("swarm") == f"thinpipe[swarm] @ git+{repository_url()}"
    assert all(requirement("swarm") in line for line in LINES.values())


@pytest.mark.parametrize("system", ["Linux", "macOS"])
@pytest.mark.parametrize("card", [False, True])
def test_a_shell_runs_the_three_commands_one_after_the_other(system, card, tmp_path):
    """With programs of the same names that say how they were called."""
    home = tmp_path / "home"
    for name in ("pip", "thinpipe"):
        program(home / "thinpipe-env" / "bin" / name, 'printf "%s|" "${0##*/}" "$@"; echo')
    program(tmp_path / "bin" / "python3", 'printf "%s|" "$@"; echo')
    if card:
        program(tmp_path / "bin" / "nvidia-smi", "true")
    environment = {"PATH": f"{tmp_path / 'bin'}", "HOME": str(home)}
    done = subprocess.run(["/bin/sh", "-c", LINES[system]], env=environment, text=True, capture_output=True, check=True)
    index = ["--extra-index-url=https://download.pytorch.org/whl/cpu"] if system == "Linux" and not card else []
    assert done.stdout.splitlines() == [
        "|".join([*words, ""])
        for words in (
            ["-m", "venv", str(home / "thinpipe-env")],
            ["pip", "install", *index, requirement("swarm")],
            ["thinpipe", "join", INVITE],
        )
    ]


def program(path, line):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o700)


def test_a_line_is_one_line_and_quotes_the_invite():
    for system, line in LINES.items():
        assert "\n" not in line
        assert line.count(f"'{INVITE}'") == 1
        if not system.startswith("Windows"):
            assert shlex.split(line)[-1] == INVITE
