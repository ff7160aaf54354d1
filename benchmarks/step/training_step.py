"""One training step of one variant on random tokens: forward, cross-entropy in float32, backward, RowwiseAdamW.

The tokens never change, and nobody looks at the loss: this is for clocks and memory meters.
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.step.variants import Variant
from thinpipe.models import ExecutionConfig, build, materialise
from thinpipe.optim import RowwiseAdamW


class TrainingStep:
    """A model with its optimiser. Call `set_batch` before the first `run`."""

    def __init__(self, variant: Variant, *, device: str, bf16: bool) -> None:
        self.variant, self.device = variant, torch.device(device)
        self.model = materialise(build(variant.model_config), seed=0, device=self.device)
        self.model.set_execution(ExecutionConfig(), autocast_bf16=bf16)
        self.optimizer = RowwiseAdamW(self.model.parameters(), fused=True)
        self.ids_BT: Tensor
        self.targets_BT: Tensor

    def set_batch(self, batch: int, seq: int) -> None:
        """Random tokens of this shape from now on, the same for every variant."""
        generator = torch.Generator().manual_seed(0)
        ids_BT = torch.randint(self.variant.vocab, (batch, seq + 1), generator=generator).to(self.device)
        self.ids_BT, self.targets_BT = ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()

    def run(self) -> None:
        self.finish(self.forward())

    def forward(self) -> Tensor:
        """The first half of a step: its loss, which holds on to all that the backward pass needs."""
        logits_BTV = self.model(self.ids_BT)
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), self.targets_BT.flatten())

    def finish(self, loss: Tensor) -> None:
        """The second half: backward and optimiser. Gradients are freed at once, as a training loop would."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed(self) -> float:
        """Seconds of one step, waiting for the device at both ends."""
        self._synchronise()
        start = time.perf_counter()
        self.run()
        self._synchronise()
        return time.perf_counter() - start

    @property
    def optimizer_nbytes(self) -> int:
        """Every tensor in the optimiser's state; 0 before the first step."""
        return sum(
            value.nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        )

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
