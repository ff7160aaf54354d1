"""Our lists of passes against those of torch: what it says it will do, or, where it says nothing true, what it does."""

import pytest
import torch
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.stage import _PipelineStageBase

from thinpipe.core.errors import UserError
from thinpipe.pipeline.pipeline_runner import SCHEDULES as REAL
from thinpipe.pipeline.placement import SCHEDULE_LAYOUTS, stages_of
from thinpipe.pipeline.stage import EarlyForwards1F1B
from thinpipe.planning.simulation.schedule_actions import Action, PassKind, action_lists


class Place(_PipelineStageBase):
    """Enough of a stage for a schedule to be made, and to be run with nothing to compute."""

    def __init__(self, index, count, process, processes):
        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size = process, processes
        self.group, self.submod, self.has_backward = None, torch.nn.Identity(), True
        self.ran = []

    def _nothing(self, *_):
        return None

    _create_grad_recv_info = _prepare_forward_infra = _prepare_backward_infra = _nothing

    def get_fwd_recv_ops(self, _):
        return []

    get_bwd_recv_ops = get_fwd_send_ops = get_bwd_send_ops = get_fwd_recv_ops

    def forward_one_chunk(self, chunk, *_, **__):
        self.ran.append(Action(self.stage_index, PassKind.FORWARD, chunk))
        return torch.zeros(())

    def backward_one_chunk(self, chunk, *_, **__):
        self.ran.append(Action(self.stage_index, PassKind.BACKWARD, chunk))

    def perform_reduce_grad(self, _):
        pass


def what_runs(kind, processes, microbatches, **settings):
    """Of every process, by letting torch run its step."""
    lists = []
    for process in range(processes):
        stage = Place(process, processes, process, processes)
        schedule = kind(stage, microbatches, loss_fn=lambda loss, _: loss, scale_grads=False, **settings)
        schedule._initialize_stage = lambda *_: None
        nothing = [()] * microbatches
        schedule._step_microbatches(nothing, [{}] * microbatches, target_mbs=nothing, return_outputs=False)
        lists.append(stage.ran)
    return lists


def what_is_ordered(kind, name, processes, microbatches):
    """torch's `pipeline_order`, which these schedules run as it is."""
    indices = stages_of(name, processes)[0]
    schedule = kind([Place(index, 2 * processes, 0, processes) for index in indices], microbatches)
    return [
        [
            Action(a.stage_index, PassKind(a.computation_type.value), a.microbatch_index)
            for a in schedule.pipeline_order[p]
            if a
        ]
        for p in range(processes)
    ]


@pytest.mark.parametrize("processes", range(2, 9))
def test_gpipe_is_what_torch_runs(processes):
    for microbatches in (1, 2, 3, processes, 2 * processes + 1):
        assert action_lists("GPipe", processes, microbatches) == what_runs(ScheduleGPipe, processes, microbatches)


@pytest.mark.parametrize("processes", range(2, 9))
def test_1f1b_is_what_runs_with_any_number_of_extra_microbatches(processes):
    for microbatches in (processes, processes + 1, 2 * processes, 3 * processes + 1, 32):
        for extra in (0, 1, 2, 7):
            ours = action_lists("1F1B", processes, microbatches, extra=extra)
            assert ours == what_runs(EarlyForwards1F1B, processes, microbatches, extra=extra)


@pytest.mark.parametrize("processes", range(2, 9))
@pytest.mark.parametrize(
    ("name", "kind"), [("Interleaved1F1B", ScheduleInterleaved1F1B), ("ZBVZeroBubble", ScheduleZBVZeroBubble)]
)
def test_schedules_with_two_stages_a_process_are_torchs_pipeline_order(name, kind, processes):
    for microbatches in (1, processes, processes + 1, 2 * processes, 2 * processes + 2, 4 * processes):
        assert action_lists(name, processes, microbatches) == what_is_ordered(kind, name, processes, microbatches)


def test_interleaved_refuses_what_torch_refuses():
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        what_is_ordered(ScheduleInterleaved1F1B, "Interleaved1F1B", 4, 9)
    with pytest.raises(UserError, match="a multiple of 4"):
        action_lists("Interleaved1F1B", 4, 9)


def test_every_schedule_can_be_planned():
    assert set(SCHEDULE_LAYOUTS) == set(REAL)


def test_one_process_runs_one_microbatch_after_the_other():
    forward, backward = PassKind.FORWARD, PassKind.BACKWARD
    assert action_lists("1F1B", 1, 2) == [[(0, forward, 0), (0, backward, 0), (0, forward, 1), (0, backward, 1)]]


def test_what_cannot_be_is_refused_and_says_what_to_do():
    with pytest.raises(UserError, match="needs 4 micro-batches or more, not 3"):
        action_lists("1F1B", 4, 3)
    with pytest.raises(UserError, match="leave them at 0"):
        action_lists("GPipe", 4, 8, extra=1)
    with pytest.raises(UserError, match="write one of GPipe, 1F1B"):
        stages_of("gpipe", 4)
