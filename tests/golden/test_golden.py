"""Every number of the golden runs is the recorded one, bit for bit, whatever things are called by now.

A digest that differs is a change of the numbers. If it is meant, `python -m tests.golden record --overwrite CASE`, and
`tests/golden/versions.toml` says what else to do.
"""

import json

import pytest

from tests.golden import boundaries
from tests.golden.environment import PINNED, pinned_environment, why_undecidable
from tests.golden.oracle import CASES, NAMED, as_recorded, differences, dump, load, observe
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.registry import COMPRESSORS, FEEDBACKS, FORMAT_COMPRESSORS
from thinpipe.models.boundary_projection import PROJECTIONS


@pytest.fixture(scope="module")
def recorded():
    found = load()
    if reason := why_undecidable(found):
        pytest.skip(reason)
    return found["cases"]


@pytest.mark.programs
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_recorded_ones(case, recorded):
    found = list(differences(case, recorded[case], observe(case)))
    assert not found, "\n".join(found[:5])


def test_every_case_is_recorded_and_every_record_is_a_case():
    assert list(load()["cases"]) == list(CASES)


def test_cases_that_differ_in_settings_differ_in_numbers():
    """So equality above is not for want of anything happening."""
    steps = [str(case["steps"]) for name, case in load()["cases"].items() if "steps" in case]
    assert len(set(steps)) == len(steps)


def test_every_way_to_cross_a_boundary_has_a_case():
    sections = [boundary for _, boundary in boundaries.CASES.values()]
    assert {section["method"] for section in sections if "method" in section} == set(FORMAT_COMPRESSORS)
    for direction, number_format in (("states", "forward"), ("gradients", "backward")):
        used = [section.get(direction, {}) for section in sections]
        assert {section.get(number_format, "fp32") for section in sections} == set(FORMATS)
        assert {each.get("kind", "none") for each in used} == {"none", *COMPRESSORS}
        assert {each.get("feedback", "none") for each in used} >= {*FEEDBACKS} - (
            {"aqsgd"} if direction == "gradients" else set()
        )
    projections = [projection for projection, _ in boundaries.CASES.values() if projection]
    assert {projection.get("kind", "keel") for projection in projections} == set(PROJECTIONS)


RECORDED = {
    "steps": [["0x1.0p+0", "0x1.8p+1"], ["0x1.1p+0", "0x1.9p+1"]],
    "tensors": [["shelves.1.books.weight", "aa"], ["last.weight", "bb"]],
    "figures": [["speed", 7]],
}
OBSERVED = {
    "steps": [["0x1.0p+0", "0x1.8p+1"], ["0x1.1p+0", "0x1.9p+1"]],
    "tensors": {"shelves.1.books.weight": "aa", "last.weight": "bb"},
    "figures": {"speed": 7, "of something new": 1},
}


def test_a_difference_is_named_with_both_values():
    def found(**changed):
        return list(differences("case", RECORDED, {**OBSERVED, **changed}))

    assert found() == []
    assert found(steps=[OBSERVED["steps"][0], ["0x1.1p+0", "0x1.9p+2"]]) == [
        "case: steps, number 2: recorded [0x1.1p+0 (1.0625), 0x1.9p+1 (3.125)], "
        "now [0x1.1p+0 (1.0625), 0x1.9p+2 (6.25)]"
    ]
    assert found(steps=OBSERVED["steps"][:1]) == ["case: steps: recorded 2, now there are 1"]
    assert found(tensors={**OBSERVED["tensors"], "last.weight": "cc"}) == [
        "case: tensors: last.weight: recorded bb, now cc"
    ]
    assert found(tensors={**OBSERVED["tensors"], "last.bias": "cc"}) == ["case: tensors: last.bias was not recorded"]
    assert found(figures={"speed": (7.0).hex()}) == ["case: figures: speed: recorded 7, now 0x1.c000000000000p+2 (7.0)"]
    assert found(validations=[["0x0p+0"]]) == ["case: validations were not recorded, and there are some now"]
    assert len(found(tensors={})) == 2


def test_a_renamed_tensor_keeps_its_digest(monkeypatch):
    now = {**OBSERVED, "tensors": {"keels.1.tables.weight": "aa", "last.weight": "bb"}}
    assert len(list(differences("case", RECORDED, now))) == 2, "one is missing, one was not recorded"
    monkeypatch.setitem(NAMED, "tensors", {"shelves": "keels", "books": "tables"})
    assert list(differences("case", RECORDED, now)) == []
    now["tensors"]["keels.1.tables.weight"] = "cc"
    assert list(differences("case", RECORDED, now)) == [
        "case: tensors: shelves.1.books.weight, which is called keels.1.tables.weight now: recorded aa, now cc"
    ]


def test_what_is_written_is_what_is_compared():
    assert (
        json.loads(dump({"cases": {"case": as_recorded(OBSERVED)}}))["cases"]["case"]["tensors"] == RECORDED["tensors"]
    )


def test_the_callers_environment_does_not_matter(monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx512")
    monkeypatch.setenv("THINPIPE_ANYTHING", "1")
    found = pinned_environment()
    assert "THINPIPE_ANYTHING" not in found
    assert {name: found[name] for name in PINNED} == PINNED


@pytest.mark.parametrize("fact", ["platform", "torch"])
def test_another_platform_cannot_decide_and_says_so(fact):
    found = load()
    other = {**found, "recorded_with": {**found["recorded_with"], fact: "another"}}
    assert why_undecidable(other).startswith(
        f"cannot decide: the digests were recorded with {fact} another, and this is "
    )


def test_a_machine_that_rounds_otherwise_cannot_decide_and_says_where():
    found = load()
    if "recorded with" in (reason := why_undecidable(found)):
        pytest.skip(reason)
    other = {**found, "arithmetic": {**found["arithmetic"], "tanh": "0" * 64}}
    assert why_undecidable(other).startswith("cannot decide: on this machine torch rounds otherwise in tanh; ")
