"""Modules of somebody else in two processes give the bits of one, under every schedule of torch that takes
micro-batches in order; and what such a pipeline refuses, saves and waits for."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import thinpipe
from tests.pipeline.compressed_worker import (
    BOUNDARIES,
    MICROBATCHES,
    SCHEDULES,
    SHAPE,
    STEPS,
    batch,
    make_stages,
    run_twin,
)
from tests.transport.processes import start
from thinpipe.pipeline.boundary_codecs import SETTINGS_NBYTES, BoundaryCodecs


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
    parts, want = compare_with_twin(
        reports, f"{schedule} {boundary}", BOUNDARIES[boundary], sum(map(len, SCHEDULES[schedule][1]))
    )
    whole = SHAPE[0] * SHAPE[1] * SHAPE[2] * 4
    stated = {*want["nbytes"], *([whole] if boundary == "topk-mask" else [])}  # validated with whole states
    stated |= {SETTINGS_NBYTES}  # once, before the first message
    for part in parts:
        assert part["nbytes"] == want["nbytes"]
        assert {*part["sent"]} <= stated
    assert {*parts[0]["sent"], *parts[1]["sent"]} == stated


def compare_with_twin(reports, name, boundary, count=2, **how):
    parts = [report["results"][name] for report in reports]
    want = json.loads(json.dumps(run_twin(boundary, count, **how)))
    (last,) = (part for part in parts if "losses" in part)
    assert last["losses"] == want["losses"]
    assert last["outputs"] == want["outputs"]
    assert parts[0]["weights"] | parts[1]["weights"] == want["weights"]
    return parts, want


def test_bfloat16_modules_equal_the_twin_bit_for_bit(reports):
    _, want = compare_with_twin(reports, "bfloat16", "int4", dtype=torch.bfloat16)
    assert want["losses"] != run_twin("int4", 2)["losses"]


def test_torchs_detailed_debugging_changes_nothing(reports):
    compare_with_twin(reports, "detailed", "int4")


def test_schedules_with_other_numbers_of_microbatches_share_a_stage(reports):
    found = reports[1]["results"]["two schedules"]
    want = run_twin("int4", 2)
    assert found["losses"] == want["losses"]
    fewer, more, again = found["outputs"][-3:]
    assert more == again == want["outputs"]
    assert fewer == want["outputs"][: SHAPE[0] * MICROBATCHES // 2]


def train(twin, steps):
    optimizer, losses = torch.optim.SGD(twin.parameters(), lr=0.1), []
    for step in steps:
        inputs, target = batch(step)
        found = twin.step(inputs, target=target, loss_fn=nn.functional.mse_loss, n_microbatches=MICROBATCHES)
        losses.append([loss.item() for loss in found])
        optimizer.step()
        optimizer.zero_grad()
    return losses


def new_twin(boundary=BOUNDARIES["topk-ef21"], count=2, seed=5):
    return thinpipe.CompressedSequential(make_stages(count), shape=SHAPE, boundary=boundary, seed=seed)


def listed(state):
    return {name: tensor.tolist() for name, tensor in state.items()}


def test_codec_state_goes_on_in_the_twin_and_in_two_processes(reports):
    twin, resumed = new_twin(), new_twin()
    losses = train(twin, range(STEPS))
    saved = twin.codec_state()
    resumed.load_state_dict(twin.state_dict())
    losses += train(twin, range(STEPS, 2 * STEPS))
    without = new_twin()
    without.load_state_dict(resumed.state_dict())
    assert train(without, range(STEPS, 2 * STEPS)) != losses[STEPS:]
    resumed.load_codec_state(saved)
    assert train(resumed, range(STEPS, 2 * STEPS)) == losses[STEPS:]
    parts = [report["results"]["resumed"] for report in reports]
    assert parts[1]["losses"] == losses
    for merged, want in zip(
        zip(*(part["states"] for part in parts), strict=True), (saved, twin.codec_state()), strict=True
    ):
        assert merged[0] | merged[1] == listed(want)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: new_twin("int4"),
            r"boundary.0.sender was saved with other settings \(saved -> here\): .*forward int4 ->",
        ),
        (lambda: new_twin(count=1), "has no boundary.0.sender: it was saved from another stage"),
        (lambda: new_twin(seed=6), "seed 6 -> 5"),
    ],
)
def test_codec_state_of_another_boundary_is_refused_and_changes_nothing(other, message):
    twin, another = new_twin(), other()
    for each in (twin, another):
        train(each, range(1))
    before = listed(twin.codec_state())
    train(another, range(1))
    with pytest.raises(thinpipe.UserError, match=message):
        twin.load_codec_state(another.codec_state())
    assert listed(twin.codec_state()) == before
    with pytest.raises(thinpipe.UserError, match="no step_number"):
        twin.load_codec_state({})
    incomplete = {name: value for name, value in twin.codec_state().items() if "receiver.gradients" not in name}
    with pytest.raises(thinpipe.UserError, match=r"boundary.0.receiver is incomplete: it has states.copy_BTW"):
        new_twin().load_codec_state(incomplete)


def test_a_slow_receiver_has_the_messages_of_two_steps_under_way(reports):
    assert reports[0]["results"]["slow receiver"] <= 2 * MICROBATCHES


def test_a_schedule_that_turns_the_microbatches_round_is_refused_in_every_process(reports):
    for report in reports:
        assert "micro-batch 3 before that of 0, as ScheduleLoopedBFS does" in report["results"]["LoopedBFS"]


def test_pickled_metadata_is_refused(reports):
    for report in reports:
        assert "metadata: refused, shapes are static" in report["results"]["metadata"]


def test_a_validation_output_cannot_be_trained():
    inputs, target = batch(0)
    loss = nn.functional.mse_loss(new_twin()(inputs[: SHAPE[0]]), target[: SHAPE[0]])
    with pytest.raises(RuntimeError, match=r"use CompressedSequential.step"):
        loss.backward()


class Wrapped(nn.Module):
    """Returns several items, as modules of other libraries do."""

    def __init__(self, module, wrap):
        super().__init__()
        self.module, self.wrap = module, wrap

    def forward(self, values):
        return self.wrap(self.module(values))


def test_one_tensor_crosses_a_boundary_also_in_a_tuple():
    def step(wrap):
        first, second = make_stages(2)
        twin = thinpipe.CompressedSequential([Wrapped(first, wrap), second], shape=SHAPE, seed=5)
        return train(twin, range(1))

    assert step(lambda output: (output,)) == step(lambda output: output)
    with pytest.raises(ValueError, match=r"returned \(Tensor, NoneType\), and one tensor crosses"):
        step(lambda output: (output, None))


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


def test_a_state_of_another_data_type_is_said_once(reports):
    first, last = (report["results"]["mixed"] for report in reports)
    (said,) = first["logged"]
    assert said.startswith("stage 0 returned torch.bfloat16, and stage 1 gets torch.float32: ")
    assert not last["logged"]
    assert last["losses"][1] != last["losses"][0]


DIFFERENT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe
import thinpipe

dist.init_process_group("gloo")
rank = dist.get_rank()
module, boundary = torch.nn.Linear(8, 8), ["int8", "int4"][rank]
stage = thinpipe.CompressedStage(module, rank, 2, "cpu", shape=(2, 6, 8), boundary=boundary)
schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
schedule.step(*([torch.zeros(4, 6, 8)] if rank == 0 else []), **({"target": torch.zeros(4, 6, 8)} if rank else {}))
"""


def test_stages_that_were_made_differently_say_so_before_the_first_message(tmp_path):
    (tmp_path / "different.py").write_text(DIFFERENT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, "different.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert (
        "UserError: stages 0 and 1 were made with different settings (0 -> 1): boundary.forward int8 -> int4; "
        "boundary.backward int8 -> int4: make all with the same"
    ) in done.stderr
    assert "terminate called" not in done.stderr


def test_the_twin_says_it_too(caplog):
    twin = thinpipe.CompressedSequential([stage.bfloat16() for stage in make_stages(2)], shape=SHAPE)
    with pytest.raises(RuntimeError, match="dtype"):
        twin(batch(0)[0][: SHAPE[0]].bfloat16())
    assert "stage 0 returned torch.bfloat16, and stage 1 gets torch.float32: " in caplog.text


def test_what_is_no_settings_or_of_another_step_is_refused():
    codecs = BoundaryCodecs((0, 1), 2, shape=SHAPE, boundary="int4", dtype=torch.float32, seed=0)
    message = codecs.settings_message(3)
    assert message.shape == (SETTINGS_NBYTES,)
    codecs.compare_settings(message, 3, previous=0)
    with pytest.raises(thinpipe.UserError, match=r"step_number 3 -> -1: load_codec_state in all stages or in none"):
        codecs.compare_settings(message, -1, previous=0)
    for wrong in (torch.zeros_like(message), torch.tensor([*b"[" * 2000], dtype=torch.uint8), message[:100]):
        with pytest.raises(thinpipe.UserError, match="there are no settings of a boundary"):
            codecs.compare_settings(wrong, 3, previous=0)


def test_a_state_of_another_shape_is_refused():
    twin = thinpipe.CompressedSequential(make_stages(2), shape=SHAPE)
    with pytest.raises(ValueError, match=r"stage 0 returned a tensor of \(1, 6, 16\), and \(2, 6, 16\) were stated"):
        twin(torch.zeros(1, 6, 8))


def test_wrong_settings_are_refused():
    with pytest.raises(thinpipe.UserError, match="there is no codec 'int5'"):
        thinpipe.CompressedSequential(make_stages(2), shape=SHAPE, boundary="int5")
    with pytest.raises(thinpipe.UserError, match="topk is one direction with settings of its own"):
        thinpipe.CompressedSequential(make_stages(2), shape=SHAPE, boundary="topk")
    with pytest.raises(thinpipe.UserError, match=r"boundary is {'forward': 'int4'}: write the name of a number format"):
        thinpipe.CompressedSequential(make_stages(2), shape=SHAPE, boundary={"forward": "int4"})
    with pytest.raises(thinpipe.UserError, match=r"dtype is torch.float16: between stages write torch.float32"):
        thinpipe.CompressedSequential(make_stages(2), shape=SHAPE, dtype=torch.float16)
    with pytest.raises(thinpipe.UserError, match="three whole numbers"):
        thinpipe.CompressedStage(nn.Linear(8, 16), 0, 2, "cpu", shape=(6, 16))
    twin = thinpipe.CompressedSequential(make_stages(2), shape=SHAPE)
    with pytest.raises(thinpipe.UserError, match="a batch of 5 samples cannot be cut into 2"):
        twin.step(torch.zeros(5, 6, 8), target=torch.zeros(5), loss_fn=nn.functional.mse_loss, n_microbatches=2)
