"""Each statement that orders a copy is needed: without it a test fails (`tests/device/mutations.py`)."""

import re

import pytest

from tests.device.mutations import MODULES, PACKAGE, all_mutations, failures, mutations


def test_statements_are_found_in_the_syntax_tree():
    source = "self._kept = x\nself._used = y\nif self._used:\n    stream.wait_stream(other)\nx.record_stream(stream)\n"
    assert [(one.line, one.text) for one in mutations(source, "m.py")] == [
        (1, "self._kept = x"),
        (5, "x.record_stream(stream)"),
        (4, "stream.wait_stream(other)"),
    ]
    with pytest.raises(ValueError, match=r"m\.py:1: stream\.record_event\(\) is no statement of its own"):
        list(mutations("done = stream.record_event()", "m.py"))


def test_no_other_module_orders_copies():
    """Except for the self-test, which makes a copy without a wait, to see that it would be noticed."""
    orders = re.compile(r"non_blocking|record_stream|wait_stream|wait_event|torch\.(Stream|Event)\b")
    paths = [path for path in PACKAGE.rglob("*.py") if orders.search(path.read_text())]
    assert {path.relative_to(PACKAGE).as_posix() for path in paths} <= {*MODULES, "selftest/copies.py"}


@pytest.mark.usefixtures("sim_library")
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, marks=() if "record_stream" in mutation.text else pytest.mark.long)
        for mutation in all_mutations()
    ],
    ids=lambda mutation: mutation.text,
)
def test_a_deleted_statement_is_noticed(mutation):
    """One of them in the default tier; all with fewer seeds than the program takes, and all tests without a seed."""
    assert failures(mutation, "-k", "seed7 or SendsAndReceives")
