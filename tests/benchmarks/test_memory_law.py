"""The memory law against the allocator of real steps, in the long tier; and the page of all."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import memory_law_huggingface as huggingface
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


@pytest.mark.long
@pytest.mark.parametrize("cases", [FEW, sorted(set(all_cases()) - set(FEW))], ids=["few", "others"])
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


HUGGINGFACE = [
    huggingface.Case("cpu", 1, "4k", "LoRA", "fp32", "none"),
    huggingface.Case("cpu", 1, "4k", "nf4", "bf16", "none"),
    huggingface.Case("cpu", 1, "4k", "full", "fp32", "block"),
]


@pytest.mark.long
def test_the_law_holds_for_huggingface_models():
    peaks = huggingface.measure(HUGGINGFACE)
    for case in HUGGINGFACE:
        [[_, steps]] = peaks[case.key]
        assert case.predicted().total == pytest.approx(steps, rel=LIMIT), case.key


def test_the_page_of_huggingface_models_is_that_of_todays_law():
    [readings] = (Path(__file__).parents[2] / "benchmarks/results").glob(f"{huggingface.NAME}_*.json")
    page = huggingface.write_page(json.loads(readings.read_text()), LIMIT)
    assert "Measured: 50 of 50 cases." in page
    rows = [line for line in page.splitlines() if line.startswith(("| cpu", "| sim", "Measured"))]
    assert set(rows) <= set(readings.with_suffix(".md").read_text().splitlines())
