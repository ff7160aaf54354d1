"""One training: a ResNet cut in four, its three boundaries crossed as in a pipeline of four, in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from time import monotonic
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.digits import SHADES, Digits, digits, shifted
from benchmarks.image_models import Classifier, draw, resnet, walk
from benchmarks.images.settings import UNCOMPRESSED, Setting
from benchmarks.provenance import versions
from thinpipe.boundary.contract import BoundaryMethod, MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.core.seeds import derive_seed
from thinpipe.models import Segment
from thinpipe.pipeline.stage_module import StageModule


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all trainings share. Optimiser and schedule are those of the paper's ResNet, the rest fits the digits."""

    widths: tuple[int, ...] = (16, 32, 32, 64)
    strides: tuple[int, ...] = (1, 2, 1, 2)
    images: int = 896
    """To train on, and as many others to test on."""
    copies: int = 3
    """Of every image to train on, each with a shift of its own that it keeps: a sample is the same in every epoch."""
    epochs: int = 6
    batch: int = 32
    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 5e-4


class Score(NamedTuple):
    """On the images to test on."""

    loss: float | None
    """None: not finite."""
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A line of the results."""

    setting: Setting
    seed: int
    recipe: Recipe
    on: Score
    """With the compression of training at inference."""
    off: Score
    """Without."""
    training_loss: float | None
    """Mean of the last epoch; None: not finite."""
    nbytes_per_image: float
    """That cross all boundaries, in both directions, without the ids."""
    seconds: float
    versions: dict[str, str]


def load(recipe: Recipe) -> Digits:
    train_NW, test_NW = digits(recipe.images, recipe.images)
    copies = [shifted(train_NW, "train", copy) for copy in range(recipe.copies)]
    return Digits(torch.cat(copies), shifted(test_NW, "test"))


def train(setting: Setting, seed: int, recipe: Recipe) -> Outcome:
    began = monotonic()
    images = load(recipe)
    model = resnet(recipe.widths, recipe.strides)
    draw(model, seed)
    shapes = message_shapes(model, images.test_NW[: recipe.batch])
    methods, whole = make_methods(setting, shapes, seed), make_methods(UNCOMPRESSED, shapes, seed)
    stage_module = stage_module_of(model, methods, seed)
    training_loss = fit(stage_module, images.train_NW, seed, recipe)
    return Outcome(
        setting=setting,
        seed=seed,
        recipe=recipe,
        on=score(stage_module, images.test_NW, recipe.batch),
        off=score(stage_module_of(model, whole, seed), images.test_NW, recipe.batch),
        training_loss=training_loss,
        nbytes_per_image=sum(map(message_nbytes, methods)) / recipe.batch,
        seconds=round(monotonic() - began, 2),
        versions=versions(),
    )


def message_shapes(model: Classifier, rows_BW: Tensor) -> list[MessageShape]:
    """Of what crosses each cut."""
    with torch.no_grad():
        states = walk(model.eval().segments, rows_BW[:, :-1])[:-1]
    sizes = (tuple(state.shape) for state in states)
    return [
        MessageShape(batch=batch, tokens=tokens, width=width, vocab_size=SHADES, dtype=torch.float32)
        for batch, tokens, width in sizes
    ]


def make_methods(setting: Setting, shapes: Sequence[MessageShape], seed: int) -> list[BoundaryMethod]:
    return [make_method(setting.boundary, shape, in_subspace=False, seed=seed) for shape in shapes]


def message_nbytes(method: BoundaryMethod) -> int:
    return method.states.compressor.nbytes + method.gradients.compressor.nbytes


def stage_module_of(model: Classifier, methods: Sequence[BoundaryMethod], seed: int) -> StageModule:
    """What a pipeline of language models is held against in tests, here with segments that see images."""
    segments = cast(Sequence[Segment], model.segments)
    return StageModule(segments, range(len(segments)), methods, seed=seed)


def fit(stage_module: StageModule, rows_NW: Tensor, seed: int, recipe: Recipe) -> float:
    """The mean loss of the last epoch."""
    optimizer = torch.optim.SGD(
        stage_module.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    steps_per_epoch = len(rows_NW) // recipe.batch
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * steps_per_epoch)
    stage_module.train()
    losses: list[float] = []
    for epoch in range(recipe.epochs):
        generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
        for rows_BW in rows_NW[torch.randperm(len(rows_NW), generator=generator)].split(recipe.batch):
            stage_module.begin(rows_BW, step=len(losses), microbatch=0)
            loss = F.cross_entropy(stage_module(), rows_BW[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
            losses.append(loss.item())
    last = losses[-steps_per_epoch:]
    return sum(last) / len(last)


@torch.no_grad()
def score(stage_module: StageModule, rows_NW: Tensor, batch: int) -> Score:
    """An answer that is not finite is wrong, and no finite loss makes up for it."""
    stage_module.eval()
    logits: list[Tensor] = []
    for step, rows_BW in enumerate(rows_NW.split(batch)):
        stage_module.begin(rows_BW, step=step, microbatch=0, backward_follows=False)
        logits.append(stage_module())
    answers, labels = torch.cat(logits), rows_NW[:, -1]
    right = (answers.argmax(1) == labels) & answers.isfinite().all(1)
    loss = F.cross_entropy(answers, labels).item()
    return Score(loss=loss if isfinite(loss) else None, accuracy=right.float().mean().item())
