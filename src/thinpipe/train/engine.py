"""Computes optimiser steps with the segments of this process: all of them, or its share of a pipeline.

The loop asks for steps and does not know which. Per-parameter norms, the loss and whether all is finite travel in one
small exchange a step and are summed in layer order, so that every placement clips by the same bits.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinpipe.boundary.contract import BoundaryMethod, MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.checkpoint import Checkpoint, restore, state_by_layer
from thinpipe.core.errors import UserError
from thinpipe.models import Model, ModelConfig, build, materialise
from thinpipe.pipeline.runner import PipelineRunner, TwinRunner
from thinpipe.pipeline.schedules import place
from thinpipe.pipeline.work import SegmentWork, token_losses
from thinpipe.subspace import Basis, BasisUpdate, GrassmannTracker, RowwiseAdamW, Subspace, rebase_squares
from thinpipe.train.config import RunConfig

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepOutcome:
    """What one step came to. With a `culprit` nothing was changed."""

    loss: float
    grad_norm: float
    """Before clipping."""
    culprit: str | None = None
    """"loss", or the first parameter in layer order whose gradient is not finite."""


class Engine:
    """With a process group, this process has the segments that the schedule gives to its rank."""

    def __init__(self, config: RunConfig, model_config: ModelConfig, group: dist.ProcessGroup | None = None) -> None:
        self.config, self.group = config, group
        self.device = choose_device(config.training.device)
        dtype = getattr(torch, config.training.dtype)
        self.model = build(model_config)
        self.names = [name for name, _ in self.model.named_parameters()]
        count = len(self.model.segments)
        self.mine = list(range(count))
        if group is not None:
            self.mine = place(config.parallelism.pipeline_parallel_schedule, group.size(), count)[group.rank()]
        for index in self.mine:
            materialise(self.model.segments[index], seed=config.debug.seed, device=self.device, dtype=dtype)
        self.model.execute(config.execution)
        self.parameters = {
            name: parameter for index in self.mine for name, parameter in self.model.segments[index].named_parameters()
        }
        self.optimizer = self._make_optimizer()
        self.tracker = self._make_tracker()
        works = [SegmentWork(self.model.segments[index], index, config.debug.seed) for index in self.mine]
        self.runner = self._make_runner(works, self._make_method(model_config, dtype))
        self._refuse_disagreement()

    def _make_optimizer(self) -> RowwiseAdamW:
        settings = self.config.optimizer
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters.values() if p.dim() >= 2]},
            {"params": [p for p in self.parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return RowwiseAdamW(
            groups,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            second_moment=settings.second_moment,
        )

    def _make_tracker(self) -> GrassmannTracker | None:
        """Where the last segment is."""
        basis = self.config.basis
        if not isinstance(self.model.space, Subspace) or not basis.interval or not self.has_last:
            return None
        tracker = GrassmannTracker(self.model.space.basis, step_size=basis.step_size, interval=basis.interval)
        self.model.segments[-1].on_gradient = tracker.observe
        return tracker

    def _make_method(self, model: ModelConfig, dtype: torch.dtype) -> BoundaryMethod:
        shape = MessageShape(
            batch=self.config.microbatch_size,
            tokens=self.config.training.seq_len,
            width=model.subspace.width or model.dim,
            vocab_size=model.vocab_size,
            dtype=dtype,
        )
        confined = model.subspace.width is not None
        return make_method(self.config.boundary, shape, confined=confined, seed=self.config.debug.seed)

    def _make_runner(self, works: list[SegmentWork], method: BoundaryMethod) -> TwinRunner | PipelineRunner:
        seed = self.config.debug.seed
        if self.group is None:
            return TwinRunner(works, method, seed=seed)
        return PipelineRunner(
            works,
            len(self.model.segments),
            method,
            schedule=self.config.parallelism.pipeline_parallel_schedule,
            microbatches=self.config.microbatches,
            seed=seed,
            device=self.device,
            group=self.group,
        )

    @property
    def has_last(self) -> bool:
        return len(self.model.segments) - 1 in self.mine

    def step(self, index: int, ids_BW: Ids, lr: float) -> StepOutcome:
        """Forward, backward and update on one global batch; no update when anything is not finite."""
        self.model.train()
        self.optimizer.zero_grad()
        before = None if self.tracker is None else (self.tracker.su_DK.clone(), self.tracker.trace.clone())
        loss = self.runner.gradients(index, self._microbatches(ids_BW))
        outcome = self._outcome(loss)
        if outcome.culprit is None:
            self._update(outcome.grad_norm, lr)
        elif self.tracker is not None and before is not None:
            self.tracker.su_DK, self.tracker.trace = before  # a step that does not count leaves no trace
        return outcome

    def _microbatches(self, ids_BW: Ids) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = torch.from_numpy(ids_BW).to(self.device).split(self.config.microbatch_size)
        return parts

    def _outcome(self, loss: float | None) -> StepOutcome:
        """The same in every process."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        local = dict(zip(self.parameters, torch.stack(list(torch._foreach_norm(gradients))).tolist(), strict=True))
        *norms, total_loss = self._share([*(local.get(name, 0.0) for name in self.names), loss or 0.0])
        bad = next((name for name, norm in zip(self.names, norms, strict=True) if not math.isfinite(norm)), None)
        grad_norm = math.sqrt(math.fsum(norm * norm for norm in norms)) if bad is None else math.nan
        return StepOutcome(total_loss, grad_norm, bad if math.isfinite(total_loss) else "loss")

    def _share(self, numbers: list[float]) -> list[float]:
        """Sums over the processes. Exact, because each number is zero everywhere but in one of them."""
        if self.group is None:
            return numbers
        vector = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(vector, group=self.group)
        return [float(number) for number in vector.tolist()]

    def _refuse_disagreement(self) -> None:
        """A wrong basis or token table leaves every norm as it was: only hashes can tell."""
        if self.group is None or not isinstance(self.model.space, Subspace):
            return
        space = self.model.space
        tables = [table for table in (space.tokens, space.positions) if table is not None]
        hashes = {"basis": space.basis.hash, **{f"table {index}": table.hash for index, table in enumerate(tables)}}
        numbers = torch.tensor([int(value[:12], 16) for value in hashes.values()], dtype=torch.int64)
        extremes = torch.stack((numbers, -numbers))
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        for name, largest, negated in zip(hashes, *extremes.tolist(), strict=True):
            if largest != -negated:
                raise UserError(
                    f"process {self.group.rank()}: not all processes have the same {name}: {hashes[name]} here"
                )

    def _update(self, grad_norm: float, lr: float) -> None:
        factor = self.config.training.max_norm / (grad_norm + 1e-6)
        if factor < 1:
            torch._foreach_mul_([p.grad for p in self.parameters.values() if p.grad is not None], factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def evaluate(self, batches: Iterable[Ids]) -> tuple[float, int]:
        """Mean loss per token over whole global batches, messages and all, and the number of tokens."""
        self.model.eval()
        losses, tokens = [], 0
        for ids_BW in batches:
            loss = self.runner.loss(self._microbatches(ids_BW))
            losses.append(self._share([loss or 0.0])[0])
            tokens += ids_BW[:, 1:].size
        return (math.fsum(losses) / len(losses), tokens) if losses else (math.nan, 0)

    def basis_is_due(self, finished_steps: int) -> bool:
        interval = self.config.basis.interval
        return isinstance(self.model.space, Subspace) and interval > 0 and finished_steps % interval == 0

    def update_basis(self, ids_BW: Ids) -> BasisUpdate | None:
        """A Grassmann step; the loss on `ids_BW` is measured before and after. None where the last segment is not."""

        def measure() -> float:
            return self.evaluate([ids_BW])[0]

        if self.tracker is not None:
            return self.tracker.update(self._change_basis, measure)
        assert isinstance(self.model.space, Subspace)
        measure()
        self._change_basis(self.model.space.basis, None)
        measure()
        return None

    def _change_basis(self, old: Basis, new: Basis | None) -> float:
        """The process that knows the new basis sends it to all; every one maps its own coordinates."""
        assert isinstance(self.model.space, Subspace)
        if self.group is not None:
            matrix_DK = (new or old).matrix_DK.clone(memory_format=torch.contiguous_format)
            schedule = self.config.parallelism.pipeline_parallel_schedule
            placement = place(schedule, self.group.size(), len(self.model.segments))
            source = next(rank for rank, mine in enumerate(placement) if len(self.model.segments) - 1 in mine)
            dist.broadcast(matrix_DK, dist.get_global_rank(self.group, source), group=self.group)
            new = Basis(matrix_DK, old.version + 1)
        assert new is not None
        squares = rebase_squares(self.parameters, self.optimizer, old, new)
        self.model.space.basis = new
        self._refuse_disagreement()
        shared = self._share([number for name in self.names for number in squares.get(name, (0.0, 0.0))])
        before, after = math.fsum(shared[0::2]), math.fsum(shared[1::2])
        return math.sqrt(after / before) if before else 1.0

    def state(self) -> dict[str, dict[str, Tensor]]:
        return state_by_layer(self.model, self.optimizer, self.tracker)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on exactly where the checkpoint was saved."""
        restore(checkpoint, self.model, self.optimizer, self.tracker)

    def start_from(self, checkpoint: Checkpoint) -> None:
        """Takes weights and basis; everything else begins anew."""
        restore(checkpoint, self.model)
        if self.tracker is not None and isinstance(self.model.space, Subspace):
            self.tracker.restart(self.model.space.basis)


@torch.no_grad()
def mean_loss(model: Model | nn.Module, batches: Iterable[Ids], device: torch.device | str) -> tuple[float, int]:
    """Mean over all tokens of all batches, however long each is, and the number of tokens. No boundaries."""
    total, tokens = 0.0, 0
    for ids_BW in batches:
        ids = torch.from_numpy(ids_BW).to(device)
        losses = token_losses(model(ids[:, :-1]), ids)
        total += losses.double().sum().item()
        tokens += losses.numel()
    return total / max(1, tokens), tokens


def choose_device(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError:
            raise UserError(f"there is no device {name!r}: write auto, cpu, cuda or cuda:N") from None
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
