"""The command line as a user meets it: in a process of its own."""

import importlib
import inspect
import io
import logging
import os
import subprocess
import sys
import time
import typing
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest
import tyro

from thinpipe import __version__, cli
from thinpipe.cli.commands import VERBS, Verb
from thinpipe.core.errors import UserError
from thinpipe.core.events import EventLog, Step

EXAMPLES = Path(__file__).parents[2] / "examples"


def thinpipe(*arguments):
    command = [sys.executable, "-m", "thinpipe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_characters_that_the_output_cannot_encode_are_replaced(tmp_path):
    """As in a pipe on Windows: the name of a machine is printed to cp1252."""
    machines = (EXAMPLES / "machines.toml").read_text("utf-8").replace('"ada"', '"Zürich-東"')
    (tmp_path / "machines.toml").write_text(machines, encoding="utf-8")
    command = [sys.executable, "-m", "thinpipe", "plan", EXAMPLES / "friends-1b.toml"]
    done = subprocess.run(
        [*command, "--machines", tmp_path / "machines.toml"],
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "Zürich-?".encode("cp1252") in done.stdout


def test_help_names_every_verb():
    done = thinpipe("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in VERBS)


@pytest.mark.quiet
def test_help_answers_in_under_a_second():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        thinpipe("--help")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0


def test_building_the_parser_imports_no_torch():
    script = (
        "import sys; from thinpipe.cli import parser_type; from thinpipe.cli.commands import VERBS; "
        "parser_type(VERBS); print([name for name in sys.modules if name in ('torch', 'matplotlib')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "[]\n"


def test_a_reader_that_has_seen_enough_gets_no_traceback(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(Step(step=1, loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, seconds=1.0, tokens_per_second=1.0))
    command = [sys.executable, "-u", "-m", "thinpipe", "report", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=600) == 1


def test_version():
    done = thinpipe("--version")
    assert (done.returncode, done.stdout) == (0, f"thinpipe {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [(("report", "run", "--agianst", "other"), "--against"), (("reprot", "run"), "report")],
)
def test_a_typo_is_answered_with_the_nearest_name(arguments, nearest):
    done = thinpipe(*arguments)
    assert done.returncode == 2
    assert nearest in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refused_setting_is_one_line():
    done = thinpipe("tokenize", "--sources", "a.txt", "--output", "b", "--validation-split", "c")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("thinpipe: ")
    assert done.stderr.count("\n") == 1


def test_no_verb_at_all_is_refused():
    assert thinpipe().returncode == 2


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_for_each_setting_and_a_function_that_takes_them(name):
    verb = VERBS[name]
    assert is_dataclass(verb.config)
    shown = thinpipe(name, "--help").stdout
    hints = typing.get_type_hints(verb.config, include_extras=True)
    for field in fields(verb.config):
        positional = tyro.conf.Positional in typing.get_args(hints[field.name])
        wanted = field.name.upper() if positional else f"--{field.name.replace('_', '-')}"
        if is_section_that_may_be_left_out(hints[field.name]):  # its flags are shown once a file has the section
            continue
        assert wanted in shown, wanted
    module, function = verb.target.split(":")
    (parameter,) = inspect.signature(getattr(importlib.import_module(module), function)).parameters.values()
    assert parameter.annotation is verb.config


def is_section_that_may_be_left_out(hint):
    return tyro.conf.AvoidSubcommands in typing.get_args(hint)


@dataclass(frozen=True, kw_only=True)
class EchoConfig:
    """Settings of a verb that exists in these tests only."""

    text: str = "a"
    """What to say."""
    inner_fails: bool = False
    """Refuse after parsing, while running."""

    def __post_init__(self):
        if self.text == "forbidden":
            raise UserError("--text may not be forbidden")


def echo(config):
    if config.text == "warn":
        try:
            raise OSError("disk full\nat last")
        except OSError:
            logging.getLogger("thinpipe.any.module").warning("could not write %s", "metrics", exc_info=True)
            logging.getLogger("thinpipe.any.module").info("a detail")
        return
    if config.inner_fails:
        raise UserError("found out late")
    int(config.text)


@pytest.fixture
def echo_verbs(monkeypatch):
    verbs = {name: Verb(EchoConfig, f"{__name__}:echo") for name in ("echo", "repeat")}
    monkeypatch.setattr(cli, "VERBS", verbs)


@pytest.mark.usefixtures("echo_verbs")
@pytest.mark.parametrize("verb", ["echo", "repeat"])
def test_verbs_run_and_may_share_their_settings(verb):
    assert cli.main([verb, "--text", "7"]) == 0


@pytest.mark.usefixtures("echo_verbs")
def test_a_warning_is_one_line_without_a_traceback(capsys):
    for _ in range(2):  # the handler is added once
        assert cli.main(["echo", "--text", "warn"]) == 0
        assert capsys.readouterr().err == "thinpipe: could not write metrics: OSError: disk full at last\n"


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def closed_file():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.usefixtures("echo_verbs")
@pytest.mark.parametrize("make_stderr", [broken_pipe, closed_file])
def test_a_warning_that_cannot_be_shown_does_not_stop_the_command(monkeypatch, make_stderr):
    stderr = make_stderr()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stderr)
        with pytest.raises((OSError, ValueError)):
            print("nobody reads this", file=sys.stderr, flush=True)
        code = cli.main(["echo", "--text", "warn"])
    with suppress(OSError):  # what was not written is flushed again
        stderr.close()
    assert code == 0


@pytest.mark.usefixtures("echo_verbs")
def test_refusals_are_told_from_bugs(capsys):
    assert cli.main(["echo", "--text", "forbidden"]) == 2
    assert capsys.readouterr().err == "thinpipe: --text may not be forbidden\n"
    assert cli.main(["echo", "--inner-fails"]) == 2
    assert capsys.readouterr().err == "thinpipe: found out late\n"
    with pytest.raises(ValueError, match="invalid literal"):  # a bug of the command keeps its traceback
        cli.main(["echo", "--text", "b"])
