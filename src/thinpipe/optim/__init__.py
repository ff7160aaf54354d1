"""Optimisers for subspace coordinates and orthonormal matrices, and the learning-rate schedule."""

from thinpipe.optim.rowwise_adamw import RowwiseAdamW

__all__ = ["RowwiseAdamW"]
