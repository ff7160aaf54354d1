"""Subspace networks (arXiv 2506.01260), in factored form.

Notation used throughout: D model width, K subspace width, V vocabulary, B batch, T tokens; U is a D x K matrix with
orthonormal columns. Everything that layers write to the residual stream lies in span(U), so the state of a token is K
numbers, and the D-wide vector that a layer reads is `base + state @ U.T`, where `base` depends on the token id (and
position) alone.
"""

from thinpipe.subspace.basis import Basis
from thinpipe.subspace.fixed_tables import FIXED_TABLES, FixedTable, GaussianTable, SignTable
from thinpipe.subspace.grassmann import BasisUpdate, GrassmannTracker, rebase_squares
from thinpipe.subspace.parameter_tags import Coordinates, coordinates_of
from thinpipe.subspace.space import DenseSpace, FreeSpace, ResidualWriter, Space, Subspace
from thinpipe.subspace.stream import DenseStream, Stream, SubspaceStream

__all__ = [
    "FIXED_TABLES",
    "Basis",
    "BasisUpdate",
    "Coordinates",
    "DenseSpace",
    "DenseStream",
    "FixedTable",
    "FreeSpace",
    "GaussianTable",
    "GrassmannTracker",
    "ResidualWriter",
    "SignTable",
    "Space",
    "Stream",
    "Subspace",
    "SubspaceStream",
    "coordinates_of",
    "rebase_squares",
]
