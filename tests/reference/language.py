"""A small language made from a seed: every token has four likely successors. Enough structure for a loss to fall."""

import numpy as np
import torch
from torch import Tensor


class SyntheticLanguage:
    """Batches of ids from a first-order chain; its entropy is about 1.9 nats, uniform guessing costs ln(vocabulary)."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=seed))
        self.vocabulary, self.seed = vocabulary, seed
        self.successors = rng.integers(0, vocabulary, size=(vocabulary, 4))

    def batch(self, step: int, batch_size: int, tokens: int) -> Tensor:
        """ids of shape [batch_size, tokens + 1]; the same for the same step."""
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=step + 1))
        ids = np.empty((batch_size, tokens + 1), dtype=np.int64)
        ids[:, 0] = rng.integers(0, self.vocabulary, size=batch_size)
        choice = rng.integers(0, 4, size=ids.shape)
        stray = rng.random(ids.shape) < 0.1
        random_ids = rng.integers(0, self.vocabulary, size=ids.shape)
        for position in range(1, tokens + 1):
            likely = self.successors[ids[:, position - 1], choice[:, position]]
            ids[:, position] = np.where(stray[:, position], random_ids[:, position], likely)
        return torch.from_numpy(ids)
