"""Who can read the data of a run, in one sentence: for the hub's owner, and for everybody before joining."""

from collections.abc import Sequence

from thinpipe.boundary.sizes import ids_cross
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.models.protocol import PipelineModelConfig


def who_reads(
    model: PipelineModelConfig, boundary: BoundaryConfig, *, chats: bool, keep_ends: Sequence[str] = ()
) -> str:
    """`keep_ends`: machines of the hub's owner, which alone compute the first and the last segment."""
    begins = "who can read the data: the hub's owner, and "
    if len(model.segments) == 1:
        return f"{begins}the machine that computes, which receives all token ids"
    if ids_cross(boundary, segments_need_ids=model.segments_need_ids):
        return f"{begins}every machine that computes, since each of them receives all token ids"
    ends = (
        f"of the machines that compute only {' and '.join(keep_ends)}, which receive the token ids and the labels"
        if keep_ends
        else "the machines with the first and the last segment, which receive the token ids and the labels"
    )
    states = "states and two flags a token" if chats else "states"
    return f"{begins}{ends}; every other machine receives {states}, from which much of the text can be recovered"
