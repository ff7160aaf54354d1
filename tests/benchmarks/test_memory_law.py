"""The memory law against the allocator of real steps: a few here, all of them in the long tier; and the page of all."""

import json
import sys

import pytest

from benchmarks.memory_law import CHECKPOINTING, LIMIT, MODELS, Case, all_cases, error, measure, write_page

FEW = [
    Case("cpu", "keel", "bf16", "none", "none", "both"),
    Case("cpu", "dense", "bf16-mixed", "none", "block", "weights"),
    Case("sim", "dense", "fp32", "optimizer", "none", "weights"),
    Case("sim", "keel", "bf16-mixed", "optimizer", "block", "weights"),
    Case("sim", "keel", "bf16", "none", "segment", "weights"),
    Case("sim", "dense", "bf16", "optimizer", "none", "activations"),
    Case("sim", "dense", "fp32", "none", "none", "tables"),
]

KNOWN = {f"cpu {model} bf16 none {checkpointing} tables": 0.15 for model in MODELS for checkpointing in CHECKPOINTING}
"""Cases that are further off, with a limit of their own. A product in bfloat16 takes a second copy of the head on a CPU
without units for it: 33 of 300 MB here."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the highest resident set can be reset on Linux only")


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(sorted(set(all_cases()) - set(FEW)), marks=pytest.mark.long)], ids=["few", "others"]
)
def test_the_law_is_within_a_tenth_of_the_allocator(cases):
    peaks = measure(cases)
    errors = {case.key: error(case, peaks[case.key]) for case in cases}
    print(json.dumps(errors, indent=1))
    assert not {key: value for key, value in errors.items() if abs(value) > KNOWN.get(key, LIMIT)}


def test_a_law_that_is_wrong_is_on_the_page():
    right = {case.key: case.predicted_nbytes for case in all_cases()}
    assert "Above 10%: 0." in write_page(right)
    wrong = Case("sim", "keel", "bf16", "optimizer", "segment", "both")
    page = write_page(right | {wrong.key: int(1.3 * wrong.predicted_nbytes)})
    assert "Above 10%: 1.\n- -23.1%: sim keel bf16 optimizer segment both" in page
    assert "Worst of 216: -23.1%" in page
