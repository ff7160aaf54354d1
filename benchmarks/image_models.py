"""Three small image classifiers on a residual stream: ResNet, ViT and MLP-Mixer, for the images of `benchmarks.digits`.

They are built like the language models: a classifier is a row of segments, and `segment(ids_BT, state)` gives the next
state, [B, tokens, width], or logits at the end. Feature maps are tokens too: one for every pixel, channels its width.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.digits import CLASSES, SHADES, SIDE
from thinpipe.core.seeds import derive_seed
from thinpipe.subspace import ResidualWriter
from thinpipe.subspace.normal import fill_normal

PATCH = 2
"""ViT and Mixer see squares of this side as their tokens."""
PATCHES = (SIDE // PATCH) ** 2


class VisionSegment(nn.Module):
    """Consecutive blocks, with what reads the image before them or the head after them at the ends."""

    is_last = False
    """A stage module takes the mean of what its last segment returns; from this one it takes logits."""

    def __init__(self, first: nn.Module | None, blocks: Sequence[nn.Module], head: nn.Module | None) -> None:
        super().__init__()
        self.first, self.blocks, self.head = first, nn.ModuleList(blocks), head

    def forward(
        self,
        ids_BT: Tensor,
        state_BTD: Tensor | None = None,
        dropout_seed: int | None = None,  # noqa: ARG002  these models have no dropout
        targets_BT: Tensor | None = None,  # noqa: ARG002  their caller computes the loss
        position_ids_BT: Tensor | None = None,  # noqa: ARG002  pixels are where they are
    ) -> Tensor:
        state_BTD = self.first(ids_BT) if self.first is not None else state_BTD
        assert state_BTD is not None
        for block in self.blocks:
            state_BTD = block(state_BTD)
        return state_BTD if self.head is None else self.head(state_BTD)


class Classifier(nn.Module):
    """Segments that follow each other, one for every group of blocks."""

    def __init__(self, first: nn.Module, groups: Sequence[Sequence[nn.Module]], head: nn.Module) -> None:
        super().__init__()
        ends = len(groups) - 1
        self.segments = nn.ModuleList(
            VisionSegment(first if index == 0 else None, blocks, head if index == ends else None)
            for index, blocks in enumerate(groups)
        )

    def forward(self, ids_BT: Tensor) -> Tensor:
        return walk(self.segments, ids_BT)[-1]


def walk(segments: Iterable[nn.Module], ids_BT: Tensor) -> list[Tensor]:
    """What leaves each segment: the state at every cut, then the logits."""
    left: list[Tensor] = []
    for segment in segments:
        left.append(segment(ids_BT, left[-1] if left else None))
    return left


def draw(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """First weights by the rule of the language models: normal, writers smaller by the root of their number."""
    writers = sum(isinstance(module, WRITERS) for module in model.modules())
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                nn.init.zeros_(parameter)
            elif not isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
                narrower = writers**0.5 if isinstance(module, WRITERS) else 1.0
                fill_normal(parameter, std / narrower, derive_seed(seed, f"{module_name}.{name}"))


class ConvWriter(nn.Conv2d):
    """A convolution whose output is added to the residual stream."""


WRITERS = (ResidualWriter, ConvWriter)


def conv(kind: type[nn.Conv2d], before: int, after: int, *, side: int = 3, stride: int = 1) -> nn.Conv2d:
    return kind(before, after, side, stride=stride, padding=side // 2, bias=False)


def as_map(state_BTD: Tensor) -> Tensor:
    """[B, D, side, side], in channels-last order: nothing is copied."""
    side = isqrt(state_BTD.shape[1])
    map_BDHW: Tensor = state_BTD.transpose(1, 2).unflatten(2, (side, side))
    return map_BDHW


def as_tokens(map_BDHW: Tensor) -> Tensor:
    return map_BDHW.flatten(2).transpose(1, 2)


class Pixels(nn.Module):
    """A token for every pixel, from its neighbourhood."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv, self.norm = conv(nn.Conv2d, 1, dim), nn.BatchNorm2d(dim)

    def forward(self, ids_BT: Tensor) -> Tensor:
        seen = self.norm(self.conv(as_map(shades(ids_BT)[:, :, None])))
        return as_tokens(F.relu(seen)).contiguous()  # one channel has no order; all that follow are channels-last


class ResidualBlock(nn.Module):
    """The basic block of ResNet-18: two convolutions, and a ReLU behind the sum as well."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv, self.norm = conv(nn.Conv2d, before, after, stride=stride), nn.BatchNorm2d(after)
        self.writer, self.writer_norm = conv(ConvWriter, after, after), nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            narrow = conv(nn.Conv2d, before, after, side=1, stride=stride)
            self.shortcut = nn.Sequential(narrow, nn.BatchNorm2d(after))

    def forward(self, state_BTD: Tensor) -> Tensor:
        seen = as_map(state_BTD)
        written = self.writer_norm(self.writer(F.relu(self.norm(self.conv(seen)))))
        return as_tokens(F.relu(self.shortcut(seen) + written))


class Patches(nn.Module):
    """A token for every square of pixels, and its place."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH**2, dim)
        self.places_TD = nn.Parameter(torch.empty(PATCHES, dim))

    def forward(self, ids_BT: Tensor) -> Tensor:
        squares = F.unfold(as_map(shades(ids_BT)[:, :, None]), PATCH, stride=PATCH)
        state_BTD: Tensor = self.embed(squares.transpose(1, 2)) + self.places_TD
        return state_BTD


class Perceptron(nn.Sequential):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), ResidualWriter(hidden, width))


class Attention(nn.Module):
    """Every token looks at every other: images have no order to keep."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.read, self.write = nn.Linear(dim, 3 * dim), ResidualWriter(dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.read(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        written: Tensor = self.write(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return written


class AcrossTokens(nn.Module):
    """A perceptron of every column of the stream: what a Mixer has for attention."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.mlp = Perceptron(tokens, 4 * tokens)

    def forward(self, x_BTD: Tensor) -> Tensor:
        written: Tensor = self.mlp(x_BTD.transpose(1, 2))
        return written.transpose(1, 2)


class MixingBlock(nn.Module):
    """Something that mixes tokens, then a perceptron for each: ViT with attention, Mixer with a perceptron across."""

    def __init__(self, dim: int, mix: nn.Module) -> None:
        super().__init__()
        self.mix_norm, self.mix = nn.LayerNorm(dim), mix
        self.mlp_norm, self.mlp = nn.LayerNorm(dim), Perceptron(dim, 4 * dim)

    def forward(self, state_BTD: Tensor) -> Tensor:
        state_BTD = state_BTD + self.mix(self.mix_norm(state_BTD))
        written: Tensor = self.mlp(self.mlp_norm(state_BTD))
        return state_BTD + written


class Head(nn.Module):
    """The mean of all tokens to logits."""

    def __init__(self, dim: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(dim, CLASSES)

    def forward(self, state_BTD: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(state_BTD).mean(1))
        return logits


def shades(ids_BT: Tensor) -> Tensor:
    """0 to 1."""
    return ids_BT.float() / (SHADES - 1)


def resnet(widths: Sequence[int], strides: Sequence[int], depth: int = 1) -> Classifier:
    """A group of `depth` blocks for each width, of which the first takes the stride."""
    groups = [
        [ResidualBlock(before, after, stride), *(ResidualBlock(after, after, 1) for _ in range(depth - 1))]
        for (before, after), stride in zip(pairwise((widths[0], *widths)), strides, strict=True)
    ]
    return Classifier(Pixels(widths[0]), groups, Head(widths[-1], nn.Identity()))


def vit(dim: int, heads: int, groups: int, depth: int) -> Classifier:
    return _mixing(dim, [[Attention(dim, heads) for _ in range(depth)] for _ in range(groups)])


def mixer(dim: int, groups: int, depth: int) -> Classifier:
    return _mixing(dim, [[AcrossTokens(PATCHES) for _ in range(depth)] for _ in range(groups)])


def _mixing(dim: int, mixes: Sequence[Sequence[nn.Module]]) -> Classifier:
    groups = [[MixingBlock(dim, mix) for mix in group] for group in mixes]
    return Classifier(Patches(dim), groups, Head(dim, nn.LayerNorm(dim)))
