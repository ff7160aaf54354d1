"""Old names and what they are called now."""

import pytest

from tests.golden.names import name_now


@pytest.mark.parametrize(
    ("old", "renamed", "now"),
    [
        ("necks.1.anchors.tokens.weight", {}, "necks.1.anchors.tokens.weight"),
        ("last.norm.weight", {"last.norm.weight": "head.norm.scale"}, "head.norm.scale"),
        ("necks.1.anchors.tokens.weight:step", {"anchors": "tables"}, "necks.1.tables.tokens.weight:step"),
        ("necks.1.anchors_before.weight", {"anchors": "tables"}, "necks.1.anchors_before.weight"),
        ("boundary.0.sender/states.error", {"boundary": "link", "error": "rest"}, "link.0.sender/states.rest"),
        ("necks.3.entry.weight", {"necks.*.entry": "segments.*.way_in"}, "segments.3.way_in.weight"),
        ("necks.3.entry.weight", {"necks": "keels", "necks.*.entry": "entries.*"}, "entries.3.weight"),
        ("a.b.c", {"a": "b", "b": "a"}, "b.a.c"),
        ("last.weight:exp_avg_sq", {"exp_avg_sq": "second_moment"}, "last.weight:second_moment"),
        ("machines.0.memory_nbytes.weights", {"memory_nbytes": "memory_bytes"}, "machines.0.memory_bytes.weights"),
    ],
)
def test_whole_components_are_renamed_once_and_the_longest_line_wins(old, renamed, now):
    assert name_now(old, renamed) == now
