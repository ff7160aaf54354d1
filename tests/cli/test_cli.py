"""The command line as a user meets it: in a process of its own."""

import importlib
import inspect
import io
import logging
import os
import shutil
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
from thinpipe.cli import parsing
from thinpipe.cli.commands import VERBS, Verb
from thinpipe.cli.overview import GROUPS
from thinpipe.cli.parsing import parse
from thinpipe.config.describe import flags_of
from thinpipe.core.errors import UserError
from thinpipe.core.events import EventLog, Step
from thinpipe.core.status_line import status_line

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


def test_help_names_every_verb_with_a_summary():
    done = thinpipe("--help")
    assert done.returncode == 0
    summaries = {name: summary for verbs in GROUPS.values() for name, summary in verbs.items()}
    assert sorted(summaries) == sorted(VERBS)
    assert all(f"{name} " in done.stdout and summary in done.stdout for name, summary in summaries.items())


@pytest.mark.quiet
@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("join", "--help")])
def test_help_answers_in_under_a_third_of_a_second(arguments):
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        thinpipe(*arguments)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.starts_with_file])
@pytest.mark.parametrize("before", [(), ("preset:default",), ("preset:default", "--training.steps", "5")])
def test_help_of_a_run_shows_what_is_usually_set_on_twenty_lines(name, before):
    done = thinpipe(name, *before, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert all(f"--{flag} " in done.stdout for flag in VERBS[name].usual)
    assert 8 <= len(VERBS[name].usual) <= 13
    assert f"thinpipe {name} --help-all" in lines[-1]


def test_help_imports_neither_torch_nor_numpy():
    script = (
        "import sys, io; from contextlib import suppress, redirect_stdout; from thinpipe.cli import main\n"
        "with suppress(SystemExit), redirect_stdout(io.StringIO()): main(['train', '--help-all'])\n"
        "print([name for name in sys.modules if name in ('torch', 'matplotlib', 'numpy')])"
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
    shown = thinpipe(name, "--help-all").stdout
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


def completed(line):
    """What bash offers for the last word of a line, by the script that it would read."""
    script = f"""
        eval "$({sys.executable} -m thinpipe completion bash)"
        COMP_WORDS=({line!r}); COMP_WORDS=($COMP_WORDS)
        [[ {line!r} == *" " ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _thinpipe
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("thinpipe tr", ["train"]),
        ("thinpipe train pre", ["preset:default", "preset:paper"]),
        ("thinpipe train examples/qui", []),  # a file name: bash's own completion follows
        ("thinpipe train run.toml --training.st", ["--training.steps"]),
        ("thinpipe train run.toml --boundary.forward i", ["int8", "int4"]),
        ("thinpipe completion z", ["zsh"]),
    ],
)
def test_bash_completes_commands_flags_and_values(line, offered):
    assert completed(line) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_of_another_shell_names_every_command_and_flag(shell):
    text = thinpipe("completion", shell).stdout
    assert all(name in text for name in VERBS)
    assert all(flag.name in text for flag in flags_of(VERBS["train"].config))
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=60)


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
    monkeypatch.setattr(parsing, "VERBS", verbs)


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


def run_file(tmp_path):
    (tmp_path / "run.toml").write_text("[training]\nsteps = 400\n[lr_scheduler]\nwarmup_steps = 40\n")
    return str(tmp_path / "run.toml")


@pytest.mark.parametrize(("steps", "warmup"), [("5", 0), ("=20", 2), ("40", 4), ("41", 40), ("=800", 40)])
def test_fewer_steps_than_the_warm_up_reduce_it_and_say_so(tmp_path, capsys, steps, warmup):
    flags = [f"--training.steps{steps}"] if steps.startswith("=") else ["--training.steps", steps]
    _, config = parse(["train", run_file(tmp_path), *flags])
    assert (config.training.steps, config.lr_scheduler.warmup_steps) == (int(steps.strip("=")), warmup)
    said = capsys.readouterr().err
    assert (f"lr_scheduler.warmup_steps is {warmup} in this run" in said) == (warmup != 40)


def test_a_warm_up_that_is_a_flag_is_not_changed(tmp_path):
    flags = ["--training.steps", "5", "--lr-scheduler.warmup-steps", "9"]
    with pytest.raises(UserError, match=r"warmup_steps 9 must be below training\.steps 5"):
        parse(["train", run_file(tmp_path), *flags])


def test_numbers_may_be_separated_by_commas(tmp_path):
    _, config = parse(["train", run_file(tmp_path), "--model.boundaries", "1,2,3"])
    assert config.model.boundaries == (1, 2, 3)


def test_a_terminal_reads_what_is_loaded_and_a_pipe_does_not(monkeypatch, capsys):
    with status_line("loading torch"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with status_line("loading torch"):
        assert capsys.readouterr().err == "loading torch ...\r"
    assert capsys.readouterr().err.strip() == ""
