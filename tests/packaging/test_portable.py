"""What every system has and Windows ignores or refuses is not called without a guard. Names that a system lacks, such
as fcntl or SIGKILL, are refused by mypy for each system (`.ci/run`)."""

import ast
from pathlib import Path

import pytest

import thinpipe

SOURCE = Path(thinpipe.__file__).parent
ALLOWED = {
    "core/files.py": {"rename"},  # `replace`, which waits for programs that have the file open
    "training/graceful_shutdown.py": {"signal"},  # after a look at sys.platform
}
"""Modules that have the one guarded use."""


def attribute_of(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def faults_in(text):
    """Calls that differ on Windows, each with its line."""
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name, given = attribute_of(call), {keyword.arg for keyword in call.keywords}
        owner = ast.unparse(call.func).rpartition(".")[0]
        if (name == "kill" and owner == "os") or name in ("send_signal", "killpg"):
            yield "signal", call.lineno  # ends the other process there, or raises
        if name == "add_signal_handler":
            yield "event loop", call.lineno  # NotImplementedError
        if {"process_group", "start_new_session"} & given and "creationflags" not in given:
            yield "process group", call.lineno  # ignored: Ctrl+C reaches the child
        if (owner, name) in (("os", "replace"), ("os", "rename")) or (name == "rename" and len(call.args) == 1):
            yield "rename", call.lineno  # refused while another program has the file open
        if (
            name in ("read_text", "write_text")
            and "encoding" not in given
            and len(call.args) < (name == "write_text") + 1
        ):
            yield "encoding", call.lineno  # cp1252
        if name == "open" and "encoding" not in given and text_mode(call):
            yield "encoding", call.lineno


def text_mode(call):
    """Whether `open(path, mode)` or `path.open(mode)` reads or writes text; a method of another class has no mode."""
    modes = [node.value for node in [*call.args, *(k.value for k in call.keywords)] if isinstance(node, ast.Constant)]
    return any(isinstance(mode, str) and set(mode) <= set("rwax+t") and mode for mode in modes)


def test_no_call_that_windows_ignores_or_refuses():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 200
    found = {
        path.relative_to(SOURCE).as_posix(): {what for what, _ in faults_in(path.read_text("utf-8"))} for path in files
    }
    assert {path: faults for path, faults in found.items() if faults} == ALLOWED


FAULTS = {
    "worker.send_signal(2)": "signal",
    "os.kill(pid, signal.SIGTERM)": "signal",
    "loop.add_signal_handler(2, stop)": "event loop",
    "Popen(command, process_group=0)": "process group",
    "os.replace(a, b)": "rename",
    "partial.rename(final)": "rename",
    "path.read_text()": "encoding",
    "path.write_text(text)": "encoding",
    'open(path, "w")': "encoding",
}


@pytest.mark.parametrize("line", FAULTS)
def test_such_a_call_would_be_found(line):
    assert [what for what, _ in faults_in(line)] == [FAULTS[line]]


@pytest.mark.parametrize(
    "line",
    ["Popen(c, process_group=0, creationflags=F)", 'path.read_text("utf-8")', 'open(path, "rb")', "text.replace(a, b)"],
)
def test_portable_calls_are_allowed(line):
    assert not [*faults_in(line)]
