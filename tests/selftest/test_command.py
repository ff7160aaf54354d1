"""`thinpipe selftest` on a CPU: page, files, exit code, calibration, and no private name in what is to be published."""

import json
import os
import re
import socket
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.readme.pages import ROOT, marked
from tests.warm import run_warm
from thinpipe.cli import main
from thinpipe.core.errors import UserError
from thinpipe.doctor.finding import not_checked, ok, problem
from thinpipe.planning.calibration import Calibration, load_calibrations
from thinpipe.selftest import command, memory, processes
from thinpipe.selftest.check import RECIPE_NAMES, Check, CheckResult, Subject, run_check
from thinpipe.selftest.report import make_report, markdown, save, verdict
from thinpipe.selftest.workload import SMALL, run_config

CPU = torch.device("cpu")


@pytest.fixture
def subject(tmp_path):
    return Subject(CPU, tmp_path, quick=True, sustained_seconds=0)


def test_it_passes_and_publishes_no_name(tmp_path):
    """The command of the how-to, in a home folder with a telling name."""
    ((program, *words),) = marked(ROOT / "docs/howto/selftest.md", "selftest")
    assert (program, words[-1]) == ("thinpipe", "--quick")
    home = tmp_path / "jane-doe"
    home.mkdir()
    variables = os.environ | {"HOME": str(home), "USER": "jane-doe", "LOGNAME": "jane-doe", "COLUMNS": "200"}
    done = run_warm("thinpipe", *words, "--device", "cpu", timeout=800, env=variables, cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("thinpipe selftest on ")
    assert lines[2].startswith("This machine is fine for training in fp32, bf16-mixed, bf16; training.offload")
    assert done.stderr == ""
    report = json.loads((home / "selftest/selftest.json").read_text())
    assert {check["finding"]["what"] for check in report["checks"]} == {check.name for check in command.checks(0)}
    assert {check["finding"]["state"] for check in report["checks"]} <= {"ok", "warning"}
    for name in ("selftest.json", "selftest.md"):
        text = (home / "selftest" / name).read_text()
        private = ("jane-doe", str(tmp_path), socket.gethostname(), str(Path.cwd()))
        assert not [word for word in private if word in text]
        assert not re.search(r"/(home|tmp|root|Users)/|\d+\.\d+\.\d+\.\d+|://", text)


PRIVATE = (
    "open /home/jane/.cache/x failed",
    r"C:\Users\Jane Doe\AppData\Local\Temp\x.py is missing",
    r"\\fileserver\share\x",
    "cannot reach 192.168.17.4:4222",
    "cannot reach [2001:db8::8a2e:370:7334]",
    "jane@example.org asked",
    "see https://jane.example/x?y",
    "host janes-pc.local, user jane",
    "~/models/x",
)


@pytest.mark.parametrize("text", PRIVATE)
def test_private_words_of_a_message_are_left_out(subject, monkeypatch, text, tmp_path):
    monkeypatch.setattr("getpass.getuser", lambda: "Jane Doe" if "Doe" in text else "jane")
    monkeypatch.setattr("socket.gethostname", lambda: "janes-pc.local")

    def fails(_what, _subject):
        raise RuntimeError(text)

    result = run_check(Check(name="check", uses=("fp32",), seconds=1, run=fails), subject)
    assert text in result.finding.text
    written = save(make_report(subject, [result], 1.0), tmp_path / "out")
    for path in written:
        published = path.read_text().lower()
        assert "stopped: runtimeerror" in published
        words = ("jane", "doe", "/home", "appdata", "fileserver", "192.168", "2001:db8", "example", "models")
        assert not [word for word in words if word in published]


def test_ordinary_texts_stay(subject, tmp_path):
    text = "predicted / measured peak: 0.97, 1.2 TFLOP/s after 60.1 s, and/or 3:2, torch 2.13.0+cpu, 10:20:30"
    result = CheckResult(finding=ok("check", text))
    save(make_report(subject, [result], 1.0), tmp_path)
    assert text in (tmp_path / "selftest.md").read_text()


def result_of(finding, *uses):
    return CheckResult(finding=finding, uses=uses)


def test_the_verdict_names_what_is_fine_what_is_not_and_what_is_unknown():
    results = [
        result_of(ok("steps in fp32", "near"), "fp32"),
        result_of(problem("steps in bf16", "far", "x"), "bf16"),
        result_of(problem("recipe bf16", "rises", "x"), "bf16"),
        result_of(not_checked("copies", "not busy"), "several processes"),
        result_of(ok("speed", "fast")),
    ]
    assert verdict(results) == [
        "This machine is fine for training in fp32.",
        'Do not set training.precision = "bf16", because steps in bf16: far (and 1 more).',
        "Cannot say anything about runs of several processes and of hubs, because copies: not busy.",
    ]


def test_a_problem_is_worse_than_what_could_not_be_checked():
    results = [result_of(not_checked("a", "?"), "fp32"), result_of(problem("b", "wrong", ""), "fp32")]
    assert verdict(results) == ['Do not set training.precision = "fp32", because b: wrong.']


def test_a_bar_in_a_message_does_not_break_the_table(subject):
    report = make_report(subject, [result_of(ok("check", "a | b\nc"))], 1.0)
    assert "| check | ok | a \\| b c |  |" in markdown(report)


def only(monkeypatch, *found):
    """Replaces all checks by one that finds this, and measures a speed."""

    def run(_what, subject):
        subject.calibrate(flops={"fp32": 1e9})
        return found[0], {}

    monkeypatch.setattr(command, "checks", lambda _seconds: [Check(name="x", uses=("fp32",), seconds=1, run=run)])


@pytest.mark.parametrize(
    ("finding", "options", "code", "kept"),
    [
        (ok("x", "fine"), (), 0, True),
        (ok("x", "fine"), ("--quick",), 0, False),
        (not_checked("x", "unknown"), (), 0, True),
        (problem("x", "wrong", "mend it"), (), 1, False),
    ],
    ids=["ok", "quick", "not checked", "problem"],
)
def test_exit_code_and_calibration(monkeypatch, tmp_path, capsys, finding, options, code, kept):
    monkeypatch.setenv("THINPIPE_STATE_FOLDER", str(tmp_path / "state"))
    only(monkeypatch, finding)
    assert main(["selftest", "--device", "cpu", "--output", str(tmp_path / "out"), *options]) == code
    assert finding.text in capsys.readouterr().out
    assert [*load_calibrations().values()] == (
        [Calibration(flops={"fp32": 1e9}, torch=torch.__version__)] if kept else []
    )


def test_a_file_in_place_of_the_folder_is_refused(monkeypatch, tmp_path, capsys):
    only(monkeypatch, ok("x", ""))
    (tmp_path / "out").touch()
    assert main(["selftest", "--output", str(tmp_path / "out")]) == 2
    assert "is a file: name a folder with --output" in capsys.readouterr().err


def test_minutes_are_filled_by_the_measurement_of_speed():
    others = sum(check.seconds for check in command.checks(0))
    assert command._sustained_seconds(command.SelftestConfig()) == 180 - others
    assert 60 <= 180 - others < 120
    assert command._sustained_seconds(command.SelftestConfig(minutes=0.1)) == command._MIN_SUSTAINED_SECONDS
    with pytest.raises(UserError, match="leave --minutes out"):
        command.SelftestConfig(quick=True, minutes=1)


def test_the_bar_moves_while_a_check_runs(monkeypatch):
    clock = iter([100.0, 103.0, 150.0, 200.0, 202.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    bar = command._Bar(console=Console(quiet=True), auto_refresh=False)
    monkeypatch.setattr(bar, "get_time", lambda: 0.0)
    bar.add_task("", total=30)
    seen = []
    bar.begin("first", 10)
    for _ in range(2):
        [*bar.get_renderables()]
        seen.append(bar.tasks[0].remaining)
    bar.begin("second", 20)
    [*bar.get_renderables()]
    assert [*seen, bar.tasks[0].remaining] == [27, 20, 18]


def test_a_refused_recipe_is_not_checked_and_the_refusal_is_shown(subject):
    def refused(_what, _subject):
        raise UserError("no units for bfloat16")

    finding = run_check(Check(name="recipe bf16", uses=("bf16",), seconds=1, run=refused), subject).finding
    assert (finding.state, finding.text) == ("not checked", "no units for bfloat16")


@pytest.mark.parametrize(
    ("two", "again", "state"),
    [(1.0, None, "ok"), (1.001, 1.0, "problem"), (1.001, 1.0005, "ok"), (1.1, 1.0005, "problem")],
    ids=["equal", "other bits", "within the spread", "outside of the spread"],
)
def test_two_processes_are_compared_with_the_spread_of_one(subject, monkeypatch, two, again, state):
    losses = iter([1.0, two, again])
    monkeypatch.setattr(processes, "_numbers", lambda _config: [(next(losses), 1.0)])
    assert processes.check_processes("two processes", subject)[0].state == state


@pytest.mark.parametrize(("factor", "state"), [(1.0, "ok"), (0.7, "problem"), (1.3, "problem")])
def test_the_memory_law_is_judged_by_its_ratio(subject, monkeypatch, factor, state):
    sizes = {name: run_config(size, CPU, "fp32") for name, size in memory.SIZES.items()}
    peaks = {
        name: memory.MemoryPeak(allocated_nbytes=memory.predicted_nbytes(config, 8192)[0])
        for name, config in sizes.items()
    }
    measured = memory.Measured(overhead_nbytes=5, peaks=peaks)
    monkeypatch.setattr(memory, "_in_other_process", lambda *_: measured)
    monkeypatch.setattr(memory, "predicted_nbytes", partial(scaled, memory.predicted_nbytes, factor))
    monkeypatch.setattr("sys.platform", "linux")
    subject.quick = False
    finding, ratios = memory.check_memory("memory law", subject)
    assert (finding.state, [*ratios]) == (state, [*memory.SIZES])
    assert subject.calibration.overhead_nbytes == 5
    if factor == 1:
        assert subject.calibration.activation_factor == pytest.approx(1)


def scaled(predicted, factor, *arguments):
    return tuple(int(factor * nbytes) for nbytes in predicted(*arguments))


def test_a_process_that_fails_to_measure_says_why(subject):
    with pytest.raises(RuntimeError, match="KeyError: 'no such size'"):
        memory._in_other_process(subject, "fp32", {"no such size": SMALL})


def test_every_recipe_that_a_user_can_choose_is_tested():
    names = {check.name for check in command.checks(0)}
    assert {f"recipe {name}" for name in RECIPE_NAMES} | {f"steps in {name}" for name in RECIPE_NAMES} <= names
