"""Modules of somebody else in two processes give the bits of one, under every schedule of torch."""

import json

import pytest
import torch
from torch import nn

import thinpipe
from tests.pipeline.compressed_worker import BOUNDARIES, SCHEDULES, SHAPE, make_stages, run_twin
from tests.transport.processes import start


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    output = tmp_path_factory.mktemp("compressed") / "result"
    workers = start(2, "tests.pipeline.compressed_worker", output)
    printed = [worker.communicate(timeout=800)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(text[-3000:] for text in printed)
    return [json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_equal_the_twin_bit_for_bit(reports, schedule, boundary):
    parts = [report["results"][f"{schedule} {boundary}"] for report in reports]
    want = json.loads(json.dumps(run_twin(BOUNDARIES[boundary], sum(map(len, SCHEDULES[schedule][1])))))
    (last,) = (part for part in parts if "losses" in part)
    assert last["losses"] == want["losses"]
    assert last["outputs"] == want["outputs"]
    assert parts[0]["weights"] | parts[1]["weights"] == want["weights"]
    whole = SHAPE[0] * SHAPE[1] * SHAPE[2] * 4
    stated = {*want["nbytes"], *([whole] if boundary == "topk-mask" else [])}  # validated with whole states
    for part in parts:
        assert part["nbytes"] == want["nbytes"]
        assert {*part["sent"]} <= stated
    assert {*parts[0]["sent"], *parts[1]["sent"]} == stated


def test_boundaries_differ_so_that_equality_means_something():
    losses = [json.dumps(run_twin(boundary, 2)["losses"]) for boundary in BOUNDARIES.values()]
    assert len(set(losses)) == len(BOUNDARIES)


def test_nothing_was_unpickled(reports):
    assert [report["unpickled"] for report in reports] == [[], []]


def test_an_exact_boundary_changes_nothing():
    inputs, target = torch.randn(4, 6, 8), torch.randn(4, 6, 1)
    plain, twin = (
        nn.Sequential(*make_stages(2)),
        thinpipe.CompressedSequential(make_stages(2), shape=SHAPE, boundary="fp32"),
    )
    loss = nn.functional.mse_loss(plain(inputs[:2]), target[:2])
    loss.backward()
    (found,) = twin.step(inputs[:2], target=target[:2], loss_fn=nn.functional.mse_loss, n_microbatches=1)
    assert torch.equal(found, loss)
    for parameter, other in zip(plain.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_wrong_settings_are_refused():
    with pytest.raises(thinpipe.UserError, match="there is no codec 'int5'"):
        thinpipe.CompressedSequential(make_stages(2), shape=SHAPE, boundary="int5")
    with pytest.raises(thinpipe.UserError, match="topk is one direction with settings of its own"):
        thinpipe.CompressedSequential(make_stages(2), shape=SHAPE, boundary="topk")
    twin = thinpipe.CompressedSequential(make_stages(2), shape=SHAPE)
    with pytest.raises(thinpipe.UserError, match="a batch of 5 samples cannot be cut into 2"):
        twin.step(torch.zeros(5, 6, 8), target=torch.zeros(5), loss_fn=nn.functional.mse_loss, n_microbatches=2)
