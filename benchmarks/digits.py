"""The images that ship with scikit-learn: 1797 handwritten digits of 8 x 8 pixels, as rows of ids.

An image is 64 ids, its shades from 0 to 16, and its label is the id behind them, as the label of a text is its next id.
So the stages and the boundaries of a pipeline carry images as they are.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.core.errors import UserError
from thinpipe.core.seeds import derive_seed

SIDE, SHADES, CLASSES = 8, 17, 10


class Digits(NamedTuple):
    """Rows of 64 shades and a label."""

    train_NW: Tensor
    test_NW: Tensor


def digits(train: int, test: int) -> Digits:
    """That many images of either part, each with the same share of every class; always the same ones."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
        from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError("the digits come with scikit-learn: pip install 'thinpipe[dev]'") from error
    found = load_digits()
    rows = np.column_stack((found.data, found.target)).astype(np.int64)
    parts = train_test_split(rows, train_size=train, test_size=test, stratify=found.target, random_state=0)
    return Digits(*map(torch.from_numpy, parts))


def shifted(rows_NW: Tensor, *words: int | str) -> Tensor:
    """Every image moved by at most one pixel along both axes, drawn from these words; what leaves the frame is lost."""
    generator = torch.Generator().manual_seed(derive_seed("shift", *words))
    framed = F.pad(rows_NW[:, :-1].unflatten(1, (SIDE, SIDE)), (1, 1, 1, 1))
    corners = torch.randint(3, (2, len(rows_NW), 1), generator=generator) + torch.arange(SIDE)
    image = torch.arange(len(rows_NW))[:, None, None]
    moved = framed[image, corners[0][:, :, None], corners[1][:, None, :]]
    return torch.cat((moved.flatten(1), rows_NW[:, -1:]), dim=1)
