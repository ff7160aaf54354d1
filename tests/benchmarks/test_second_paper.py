"""Both tasks of the second paper in one table."""

from benchmarks.images.claims import Results as Images
from benchmarks.images.execute import tasks
from benchmarks.lossy_boundaries import page
from benchmarks.lossy_claims import decide
from tests.benchmarks.test_finetune import made_up
from tests.benchmarks.test_images import outcome


def test_every_claim_has_a_row_with_a_verdict_of_each_task():
    images = Images.of(outcome(setting, seed, fragile="gradients") for setting, seed in tasks())
    finetuning = made_up(seeds=(0,))
    claims = decide(images.evidence, images.judge)
    rows = [line for line in page(claims, decide(finetuning.evidence, finetuning.judge)) if line.startswith("| ")]
    assert len(rows) == 1 + len(claims)
    assert all(row.count("|") == 5 for row in rows)
    assert all(f"| **{claim.verdict}**" in row for claim, row in zip(claims, rows[1:], strict=True))
    assert all("**not decided: 1 of 3 seeds**" in row for row in rows[1:])
