"""Sketches of weights: 64 numbers a layer, from which follows by how much the layer has changed between two checkpoints
without keeping the first.

A sketch is a random signed sum over 64 buckets (count sketch). The expected squared distance between two sketches is
the squared distance between the weights; equal weights have equal sketches.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from thinpipe.checkpoint import layers_of
from thinpipe.core.seeds import derive_seed

_BUCKETS, _CHUNK = 64, 1 << 20
Sketch = list[float]


def sketch_layers(parameters: Mapping[str, Tensor], *, seed: int) -> dict[str, Sketch]:
    """A sketch of the matrices of each layer, in units of the root mean square. Vectors and what is not trained are
    left out. Sketches with the same seed can be compared."""
    layers: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.dim() > 1:
            layers.setdefault(layers_of([name])[0], []).append(name)
    return {layer: _sketch(((name, parameters[name]) for name in names), seed) for layer, names in layers.items()}


def root_mean_square_change(before: Sketch, after: Sketch) -> float:
    return math.dist(before, after)


@torch.no_grad()
def _sketch(named: Iterable[tuple[str, Tensor]], seed: int) -> Sketch:
    sums, count = torch.zeros(_BUCKETS, dtype=torch.float64), 0
    for name, parameter in named:
        signs = torch.Generator().manual_seed(derive_seed("weight sketch", seed, name))
        for chunk in parameter.detach().reshape(-1).split(_CHUNK):
            values = torch.zeros(-(-len(chunk) // _BUCKETS) * _BUCKETS, dtype=torch.float64)
            values[: len(chunk)] = chunk.cpu()
            flips = torch.randint(0, 2, (len(values),), generator=signs, dtype=torch.int8)
            sums += values.mul_(2 * flips - 1).view(-1, _BUCKETS).sum(0)
        count += parameter.numel()
    return [float(total) for total in sums / math.sqrt(count)]
