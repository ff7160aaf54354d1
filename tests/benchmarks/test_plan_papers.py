"""What the clock of a plan says of published runs, and that the committed page is what it says now."""

from pathlib import Path

import pytest

from benchmarks import plan_papers

PAGE = Path(plan_papers.__file__).parent / "results" / "plan_papers_2026-11-17.md"


@pytest.mark.parametrize("entry", plan_papers.ENTRIES, ids=lambda entry: entry.name)
def test_protocol_nanogpts_step_times_are_predicted(entry):
    assert entry.predicted_s == pytest.approx(entry.published_s, rel=0.1)


def test_the_fit_has_the_published_rate_of_the_thin_run():
    one = plan_papers.Assumption(stages=8, itemsize=4, microbatches=1)
    assert one.tokens_per_second(plan_papers.WIDTH, one.fitted_pass_s) == pytest.approx(plan_papers.THIN, rel=1e-4)


def test_the_committed_page_is_what_is_computed():
    assert PAGE.read_text() == plan_papers.page()
