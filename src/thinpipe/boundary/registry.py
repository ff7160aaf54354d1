"""Boundary methods by name. Adding one is a file and a line here; the contract test covers it from then on."""

from collections.abc import Callable

from thinpipe.boundary.contract import BoundaryMethod, MessageShape
from thinpipe.boundary.plain import make_none, make_subspace
from thinpipe.boundary.settings import BoundarySection
from thinpipe.core.errors import UserError

METHODS: dict[str, Callable[[MessageShape, BoundarySection, int], BoundaryMethod]] = {
    "none": make_none,
    "subspace": make_subspace,
}


def make_method(settings: BoundarySection, shape: MessageShape, *, confined: bool, seed: int) -> BoundaryMethod:
    """The method for every boundary of a model; both ends make it from the same settings.

    `confined` says that the state is coordinates in a subspace.
    """
    name = settings.method or ("subspace" if confined else "none")
    if (name == "subspace") != confined:
        wanted = "a subspace model (set model.subspace.width)" if name == "subspace" else "a dense model"
        raise UserError(f"boundary.method {name!r} is for {wanted}: leave boundary.method out to get the right one")
    return METHODS[name](shape, settings, seed)
