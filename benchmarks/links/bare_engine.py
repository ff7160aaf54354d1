"""torch's pipelining as it comes, over gloo: the segments of a dense model, a schedule and AdamW, nothing else of ours.

What `python -m benchmarks.links` compares the product with, so it must stay as short and as fast as a person would
write it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.links.workload import Run
from thinpipe.models import Segment, build, materialise

LEARNING_RATE = 1e-4
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class _Alone(nn.Module):
    """A segment with the one argument that its stage is given: ids for the first, a state for the others."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self.segment = segment

    def forward(self, given: Tensor) -> Tensor:
        if self.segment.first is not None:
            return self.segment(given)  # type: ignore[no-any-return]
        no_ids = given.new_empty(given.shape[:2], dtype=torch.int64)  # a dense segment asks them for their shape only
        return self.segment(no_ids, given)  # type: ignore[no-any-return]


class BareEngine:
    """One stage in every process of the default group."""

    def __init__(self, run: Run) -> None:
        shape, rank = run.shape, dist.get_rank()
        model = build(run.config.model.resolve(shape.vocab))
        segment = materialise(model.segments[rank], seed=0, device="cpu")
        self.first, self.last = rank == 0, rank == shape.stages - 1
        ids = torch.zeros(shape.sequences, shape.seq_len, dtype=torch.int64)
        state = torch.zeros(shape.sequences, shape.seq_len, shape.dim, requires_grad=True)
        logits = torch.zeros(shape.sequences, shape.seq_len, shape.vocab, requires_grad=True)
        stage = PipelineStage(
            _Alone(segment),
            rank,
            shape.stages,
            torch.device("cpu"),
            input_args=(ids if self.first else state,),
            output_args=(logits if self.last else state,),
        )
        self.schedule = SCHEDULES[run.schedule](stage, shape.microbatches, loss_fn=_loss)
        self.optimizer = torch.optim.AdamW(segment.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self, ids_BW: Tensor) -> float | None:
        """Every process has the batch, so nobody has to send labels. The loss comes out where the last stage is."""
        losses: list[Tensor] = []
        self.optimizer.zero_grad()
        if self.first:
            self.schedule.step(ids_BW[:, :-1].contiguous(), return_outputs=False)
        elif self.last:
            self.schedule.step(target=ids_BW[:, 1:].contiguous(), losses=losses, return_outputs=False)
        else:
            self.schedule.step(return_outputs=False)
        self.optimizer.step()
        return torch.stack(losses).mean().item() if self.last else None


def _loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
