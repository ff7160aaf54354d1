"""A model of your own in plain PyTorch, in two processes that exchange int4 messages.

    torchrun --nproc-per-node 2 examples/own_model.py [STEPS]

A small vision transformer learns in which quarter of a noisy image the bright spot is. The last process also trains the
twin, all stages in one process, and compares losses and the weights of its own stage, bit for bit."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import thinpipe

BATCH, MICROBATCHES, PATCHES, WIDTH = 32, 4, 16, 64
BOUNDARY = {"shape": (BATCH // MICROBATCHES, PATCHES, WIDTH), "boundary": "int4", "seed": 0}


class Patches(nn.Module):
    """Images [B, 16, 16] to patches of 4 x 4 pixels as [B, 16, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.position = nn.Linear(16, WIDTH), nn.Parameter(torch.randn(PATCHES, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(images), PATCHES, 16)
        return self.project(patches) + self.position


class Classifier(nn.Linear):
    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.mean(1))


def make_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True) for _ in range(4)]
    return [nn.Sequential(Patches(), *blocks[:2]), nn.Sequential(*blocks[2:], Classifier(WIDTH, 4))]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images, quarters = torch.randn(BATCH, 16, 16, generator=generator), torch.arange(BATCH) % 4
    for image, quarter in zip(images, quarters, strict=True):
        image[8 * (quarter // 2) :, 8 * (quarter % 2) :][2:6, 2:6] += 2.0
    return images, quarters


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    rank, loss_fn = dist.get_rank(), nn.functional.cross_entropy
    module, twin = make_stages()[rank], thinpipe.CompressedSequential(make_stages(), **BOUNDARY)
    stage = thinpipe.CompressedStage(module, rank, 2, torch.device("cpu"), **BOUNDARY)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (module, twin)]
    equal = True
    for step in range(steps):
        (images, quarters), losses = batch(step), []
        schedule.step(*([images] if rank == 0 else []), **({"target": quarters, "losses": losses} if rank else {}))
        if rank:
            expected = twin.step(images, target=quarters, loss_fn=loss_fn, n_microbatches=MICROBATCHES)
            equal &= torch.equal(torch.stack(losses), torch.stack(expected))
            print(f"step {step + 1}: loss {torch.stack(losses).mean():.4f}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if rank:
        weights = zip(module.parameters(), twin.stages[1].parameters(), strict=True)
        equal &= all(torch.equal(weight, other) for weight, other in weights)
        print(f"{stage.forward_nbytes} bytes a message, equal to one process: {equal}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
