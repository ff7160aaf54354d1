"""Computes optimiser steps with the segments of this process: all of them, or its share of a pipeline.

The loop asks for steps and does not know which. Per-parameter norms, the loss, whether someone was asked to stop and
what the links did travel in one small exchange a step; norms are summed in layer order, so that every placement clips
by the same bits.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinpipe.checkpoint import Checkpoint, layers_of, memories, restore, restore_memories, state_by_layer
from thinpipe.core.errors import UserError
from thinpipe.core.events import LinkUse
from thinpipe.core.resident import peak_resident_nbytes
from thinpipe.models import Model, ModelConfig, build, materialise
from thinpipe.pipeline.chain import Chain, token_losses
from thinpipe.pipeline.placement import place
from thinpipe.pipeline.runner import Runner, TwinRunner
from thinpipe.pipeline.watch import Watch
from thinpipe.subspace import Basis, BasisUpdate, GrassmannTracker, RowwiseAdamW, Subspace, rebase_squares
from thinpipe.train.boundaries import boundary_method
from thinpipe.train.config import RunConfig
from thinpipe.train.faults import Fault, find_fault
from thinpipe.transport.star import Exchange, exchange_of

Ids = npt.NDArray[np.int64]
_MOST_TOLD = 2.0**63
"""More is no number of bytes, and a log cannot hold it."""


@dataclass(frozen=True)
class StepOutcome:
    """What one step came to. With a fault nothing was changed."""

    loss: float
    grad_norm: float
    """Before clipping."""
    fault: Fault | None = None
    stop: bool = False
    """Some process was asked to stop."""
    links: list[LinkUse] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    """The share of the step in which each process computed; the rest is the bubble. Empty for one process."""
    memory: list[int] = field(default_factory=list)
    """The most bytes that each process ever held."""


class Engine:
    """With a process group, this process has the segments that the schedule gives to its rank."""

    def __init__(
        self,
        config: RunConfig,
        model_config: ModelConfig,
        group: dist.ProcessGroup | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.config, self.group, self.exchange = config, group, exchange or exchange_of(group)
        self.device = choose_device(config.training.device)
        dtype = getattr(torch, config.training.dtype)
        self.model = build(model_config)
        self.names = [name for name, _ in self.model.named_parameters()]
        parallelism, count = config.parallelism, len(self.model.segments)
        self.placement = place(
            parallelism.pipeline_parallel_schedule, self.exchange.size, count, parallelism.pipeline_parallel_shares
        )
        self.mine = self.placement.segments_of(self.exchange.rank)
        self.homes = self.placement.homes
        self.segment_of = {
            name: index for index, segment in enumerate(self.model.segments) for name, _ in segment.named_parameters()
        }
        self.watch = Watch()
        for index in self.mine:
            materialise(self.model.segments[index], seed=config.debug.seed, device=self.device, dtype=dtype)
        self.model.execute(config.execution)
        self.parameters = {
            name: parameter for index in self.mine for name, parameter in self.model.segments[index].named_parameters()
        }
        self.optimizer = self._make_optimizer()
        self.tracker = self._make_tracker()
        self.methods = [boundary_method(model_config, config) for _ in range(count - 1)]
        self.runner = self._make_runner()
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

    def _make_runner(self) -> Runner:
        chains = [
            Chain(
                self.model.segments,
                self.placement.stages[stage],
                self.methods,
                seed=self.config.debug.seed,
                watch=self.watch,
            )
            for stage in self.placement.processes[self.exchange.rank]
        ]
        if self.group is None:
            return TwinRunner(chains[0])
        from thinpipe.pipeline.pipeline_runner import PipelineRunner  # torch's pipelining takes a second to import

        parallelism = self.config.parallelism
        return PipelineRunner(
            chains,
            self.placement,
            self.group,
            schedule=parallelism.pipeline_parallel_schedule,
            extra=parallelism.pipeline_parallel_extra_microbatches,
            microbatches=self.config.microbatches,
            device=self.device,
        )

    @property
    def has_first(self) -> bool:
        return 0 in self.mine

    @property
    def has_last(self) -> bool:
        return len(self.model.segments) - 1 in self.mine

    def step(
        self, index: int, ids_BW: Ids | None, lr: float, *, asked_to_stop: Callable[[], bool] = lambda: False
    ) -> StepOutcome:
        """Forward, backward and update on one global batch. When anything was bad there is no update and no trace:
        the same step may be computed again, bit for bit.

        Ids are needed where the first segment is. `asked_to_stop` speaks for this process.
        """
        self.model.train()
        self.optimizer.zero_grad()
        self.watch.begin()
        for method in self.methods:
            method.mark()
        before = None if self.tracker is None else (self.tracker.su_DK.clone(), self.tracker.trace.clone())
        loss = self.runner.gradients(index, self._microbatches(ids_BW))
        outcome = self._outcome(loss, stop=asked_to_stop())
        if outcome.fault is None:
            self.watch.accept()
            self._update(outcome.grad_norm, lr)
            return outcome
        for method in self.methods:
            method.go_back()
        if self.tracker is not None and before is not None:
            self.tracker.su_DK, self.tracker.trace = before
        return outcome

    def _microbatches(self, ids_BW: Ids | None) -> tuple[Tensor, ...]:
        if ids_BW is None or not self.has_first:
            return ()
        parts: tuple[Tensor, ...] = torch.from_numpy(ids_BW).to(self.device).split(self.config.microbatch_size)
        return parts

    def _outcome(self, loss: float | None, *, stop: bool) -> StepOutcome:
        """The same in every process: the sums are exact, because each number is zero everywhere but in one."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        local = dict(zip(self.parameters, torch.stack(list(torch._foreach_norm(gradients))).tolist(), strict=True))
        received = {(part.boundary, part.forward): part for part in self.runner.received()}
        ends = [(boundary, forward) for boundary in range(len(self.methods)) for forward in (True, False)]
        not_finite, absurd = self.watch.not_finite(), self.watch.absurd()
        waited = sum(part.waited_seconds for part in received.values())
        seconds, held = self.runner.seconds, float(self._peak_nbytes())
        shared = iter(
            self.exchange.sum(
                [
                    *(local.get(name, 0.0) for name in self.names),
                    loss or 0.0,
                    float(stop),
                    *(float(not_finite.get(end, 0)) for end in ends),
                    *(float(absurd.get(end, 0)) for end in ends),
                    *(float(received[end].nbytes) if end in received else 0.0 for end in ends),
                    *(received[end].waited_seconds if end in received else 0.0 for end in ends),
                    *(seconds if rank == self.exchange.rank else 0.0 for rank in range(self.exchange.size)),
                    *(waited if rank == self.exchange.rank else 0.0 for rank in range(self.exchange.size)),
                    *(held if rank == self.exchange.rank else 0.0 for rank in range(self.exchange.size)),
                ]
            )
        )
        norms = dict(zip(self.names, islice(shared, len(self.names)), strict=True))
        total_loss, stops = next(shared), next(shared)
        bad = [dict(zip(ends, islice(shared, len(ends)), strict=True)) for _ in range(2)]
        told = map(_credible, shared)
        nbytes, waits = list(islice(told, len(ends))), list(islice(told, len(ends)))
        took, idle = list(islice(told, self.exchange.size)), list(islice(told, self.exchange.size))
        memory = [int(nbytes) for nbytes in islice(told, self.exchange.size)]
        fault = find_fault(bad[0], bad[1], total_loss, norms, homes=self.homes, segments=self.segment_of)
        grad_norm = math.sqrt(math.fsum(norm * norm for norm in norms.values())) if fault is None else math.nan
        longest = max(took) or math.inf
        links = [
            LinkUse(boundary=end[0], forward=end[1], nbytes=int(count), waited_s=wait, mbps=count * 8e-6 / longest)
            for end, count, wait in zip(ends, nbytes, waits, strict=True)
            if count
        ]
        busy = [1 - wait / whole if whole else 0.0 for wait, whole in zip(idle, took, strict=True)] if links else []
        return StepOutcome(total_loss, grad_norm, fault, stop=stops > 0, links=links, busy=busy, memory=memory)

    def _peak_nbytes(self) -> int:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.device) if on_gpu else peak_resident_nbytes()

    def _refuse_disagreement(self) -> None:
        hashes = self.model.space.hashes
        if not hashes:
            return
        numbers = [float(int(value[:12], 16)) for value in hashes.values()]
        extremes = self.exchange.largest([*numbers, *(-number for number in numbers)])
        for index, (name, value) in enumerate(hashes.items()):
            if extremes[index] != -extremes[index + len(hashes)]:
                raise UserError(
                    f"process {self.exchange.rank}: not all processes have the same {name}: {value} here; "
                    "start them all from the same checkpoint and with the same settings"
                )

    def _update(self, grad_norm: float, lr: float) -> None:
        factor = self.config.training.max_norm / (grad_norm + 1e-6)
        if factor < 1:
            torch._foreach_mul_([p.grad for p in self.parameters.values() if p.grad is not None], factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def evaluate(self, batches: Iterable[Ids | None]) -> tuple[float, int]:
        """Mean loss per token over whole global batches, messages and all, and the number of tokens.

        As many batches in every process; ids are needed where the first segment is.
        """
        self.model.eval()
        losses = []
        for ids_BW in batches:
            loss = self.runner.loss(self._microbatches(ids_BW))
            losses.append(self.exchange.sum([loss or 0.0])[0])
        tokens = len(losses) * self.config.training.global_batch_size * self.config.training.seq_len
        return (math.fsum(losses) / len(losses), tokens) if losses else (math.nan, 0)

    def basis_is_due(self, finished_steps: int) -> bool:
        interval = self.config.basis.interval
        return isinstance(self.model.space, Subspace) and interval > 0 and finished_steps % interval == 0

    def update_basis(self, ids_BW: Ids | None) -> BasisUpdate:
        """A Grassmann step; the loss on `ids_BW` is measured before and after. Every process knows what it came to."""

        def measure() -> float:
            return self.evaluate([ids_BW])[0]

        if self.tracker is not None:
            update = self.tracker.update(self._change_basis, measure)
            told = msgspec.msgpack.encode(update)  # which, unlike JSON, can say NaN
        else:
            assert isinstance(self.model.space, Subspace)
            measure()
            self._change_basis(self.model.space.basis, None)
            measure()
            told = b""
        return msgspec.msgpack.decode(self.exchange.spread(told, self.placement.last_process), type=BasisUpdate)

    def _change_basis(self, old: Basis, new: Basis | None) -> float:
        """The process that knows the new basis sends it to all; every one maps its own coordinates."""
        assert isinstance(self.model.space, Subspace)
        matrix_DK = (new or old).matrix_DK.clone(memory_format=torch.contiguous_format)
        self.exchange.broadcast(matrix_DK, self.placement.last_process)
        new = Basis(matrix_DK, old.version + 1)
        squares = rebase_squares(self.parameters, self.optimizer, old, new)
        self.model.space.basis = new
        self._refuse_disagreement()
        shared = self.exchange.sum([number for name in self.names for number in squares.get(name, (0.0, 0.0))])
        before, after = math.fsum(shared[0::2]), math.fsum(shared[1::2])
        return math.sqrt(after / before) if before else 1.0

    @property
    def layers(self) -> list[str]:
        """The files of a checkpoint that hold this process's part of the model."""
        return layers_of(self.parameters)

    @property
    def memory_layers(self) -> list[str]:
        """The files that hold what its boundaries remember."""
        return list(memories(self.methods, self.mine))

    def state(self, *, with_space: bool) -> dict[str, dict[str, Tensor]]:
        """What this process has to save; the space is the same everywhere, and one process for each folder saves it."""
        space = self.model.space if with_space else None
        model = state_by_layer(self.parameters, space, self.optimizer, self.tracker)
        return model | memories(self.methods, self.mine)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on exactly where the checkpoint was saved."""
        restore(checkpoint, self.parameters, self.model.space, self.optimizer, self.tracker)
        restore_memories(checkpoint, self.methods, self.mine)
        self._refuse_disagreement()

    def start_from(self, checkpoint: Checkpoint) -> None:
        """Takes weights and basis; everything else begins anew."""
        restore(checkpoint, self.parameters, self.model.space)
        self._refuse_disagreement()
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


def _credible(told: float) -> float:
    """Of bytes and seconds that other processes told, which nobody checks: what cannot be is 0."""
    return told if 0 <= told < _MOST_TOLD else 0.0


def choose_device(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError:
            raise UserError(f"there is no device {name!r}: write auto, cpu, cuda or cuda:N") from None
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
