"""Computes optimiser steps in one process that hosts all segments. The loop asks for steps, no more.

Micro-batch gradients are summed in order and divided once; the norm for clipping comes from per-parameter norms in
layer order. Any other engine has to do the same sums in the same order to give the same bits.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.checkpoint import Checkpoint, restore, state_by_layer
from thinpipe.core.errors import UserError
from thinpipe.core.seeds import derive_seed
from thinpipe.models import Model, ModelConfig, build, materialise
from thinpipe.subspace import BasisUpdate, GrassmannTracker, RowwiseAdamW, Subspace
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


class LocalEngine:
    """The whole model on one device."""

    def __init__(self, config: RunConfig, model_config: ModelConfig) -> None:
        self.config = config
        self.device = choose_device(config.training.device)
        dtype = getattr(torch, config.training.dtype)
        self.model = materialise(build(model_config), seed=config.debug.seed, device=self.device, dtype=dtype)
        self.model.execute(config.execution)
        settings = config.optimizer
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.model.parameters() if p.dim() >= 2]},
            {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = RowwiseAdamW(
            groups,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            second_moment=settings.second_moment,
        )
        self.tracker: GrassmannTracker | None = None
        if isinstance(self.model.space, Subspace) and config.basis.interval:
            basis = config.basis
            self.tracker = GrassmannTracker(self.model.space.basis, step_size=basis.step_size, interval=basis.interval)
            self.model.segments[-1].on_gradient = self.tracker.observe

    def step(self, index: int, ids_BW: Ids, lr: float) -> StepOutcome:
        """Forward, backward and update on one global batch; no update when anything is not finite."""
        self.model.train()
        self.optimizer.zero_grad()
        microbatches = torch.from_numpy(ids_BW).to(self.device).split(self.config.microbatch_size)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        before = None if self.tracker is None else (self.tracker.su_DK.clone(), self.tracker.trace.clone())
        for microbatch, ids in enumerate(microbatches):
            part = token_losses(self._forward(ids[:, :-1], index, microbatch), ids).mean()
            part.backward()
            loss += part.detach()
        outcome = self._check((loss / len(microbatches)).item(), len(microbatches))
        if outcome.culprit is None:
            self._update(outcome.grad_norm, lr)
        elif self.tracker is not None and before is not None:
            self.tracker.su_DK, self.tracker.trace = before  # a step that does not count leaves no trace
        return outcome

    def _forward(self, ids_BT: Tensor, step: int, microbatch: int) -> Tensor:
        """Segment by segment, each with its own seed for dropout: the same wherever a segment runs."""
        state: Tensor | None = None
        for number, segment in enumerate(self.model.segments):
            torch.manual_seed(derive_seed(self.config.debug.seed, "dropout", step, microbatch, number))
            state = segment(ids_BT, state)
        assert state is not None
        return state

    def _check(self, loss: float, microbatches: int) -> StepOutcome:
        named = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        gradients = [gradient for _, gradient in named]
        if microbatches > 1:
            torch._foreach_div_(gradients, float(microbatches))
        norms = torch.stack(list(torch._foreach_norm(gradients))).tolist()
        total = math.sqrt(math.fsum(norm * norm for norm in norms))
        bad = next((name for (name, _), norm in zip(named, norms, strict=True) if not math.isfinite(norm)), None)
        return StepOutcome(loss, total, bad if math.isfinite(loss) else "loss")

    def _update(self, grad_norm: float, lr: float) -> None:
        factor = self.config.training.max_norm / (grad_norm + 1e-6)
        if factor < 1:
            torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def evaluate(self, batches: Iterable[Ids]) -> tuple[float, int]:
        """Mean loss per token over all batches, and the number of tokens."""
        self.model.eval()
        return mean_loss(self.model, batches, self.device)

    def basis_is_due(self, finished_steps: int) -> bool:
        return self.tracker is not None and self.tracker.is_due(finished_steps)

    def update_basis(self, ids_BW: Ids) -> BasisUpdate:
        """A Grassmann step; the loss on `ids_BW` is measured before and after."""
        assert self.tracker is not None
        size = self.config.microbatch_size
        parts = [ids_BW[start : start + size] for start in range(0, len(ids_BW), size)]
        return self.tracker.update(
            lambda old, new: self.model.change_basis(old, new, self.optimizer), lambda: self.evaluate(parts)[0]
        )

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
def mean_loss(model: Model, batches: Iterable[Ids], device: torch.device | str) -> tuple[float, int]:
    """Mean over all tokens of all batches, however long each is, and the number of tokens."""
    total, tokens = 0.0, 0
    for ids_BW in batches:
        ids = torch.from_numpy(ids_BW).to(device)
        losses = token_losses(model(ids[:, :-1]), ids)
        total += losses.double().sum().item()
        tokens += losses.numel()
    return total / max(1, tokens), tokens


def token_losses(logits_BTV: Tensor, ids_BW: Tensor) -> Tensor:
    """Cross-entropy of every token, in float32 at least."""
    logits = logits_BTV.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, ids_BW[:, 1:].flatten(), reduction="none")


def choose_device(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError:
            raise UserError(f"there is no device {name!r}: write auto, cpu, cuda or cuda:N") from None
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
