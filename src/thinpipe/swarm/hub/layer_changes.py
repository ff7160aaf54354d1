"""Finds layers that a peer does not train: between two measured commits they change far less than the others."""

from collections.abc import Mapping

from thinpipe.core.audit_events import LayersUnchanged
from thinpipe.training.weight_sketch import Sketch, root_mean_square_change

_SMALLEST_CHANGE = 1e-3
"""Share of the largest change. AdamW moves all weights that have gradients by about the learning rate; tables of rare
tokens move least, and still by more than this (`benchmarks.liars`)."""


class LayerChanges:
    """Compares each measured commit of a generation with the one before. Pure."""

    def __init__(self) -> None:
        self._holders: Mapping[str, str] = {}
        self._before: tuple[int, Mapping[str, Sketch]] | None = None

    def on_generation(self, holders: Mapping[str, str]) -> None:
        """`holders`: the peer that trains each layer from now on. Earlier commits are of other holders."""
        self._holders, self._before = holders, None

    def on_commit(self, step: int, sketches: Mapping[str, Sketch]) -> LayersUnchanged | None:
        """What this commit shows; None: every layer has changed, or there is nothing to compare it with."""
        before, self._before = self._before, (step, sketches)
        if before is None:
            return None
        changes = {
            layer: root_mean_square_change(before[1][layer], sketch)
            for layer, sketch in sketches.items()
            if layer in before[1]
        }
        limit = _SMALLEST_CHANGE * max(changes.values(), default=0.0)
        unchanged = [layer for layer, change in changes.items() if change < limit and layer in self._holders]
        if not unchanged:
            return None
        peers = [*dict.fromkeys(self._holders[layer] for layer in unchanged)]
        return LayersUnchanged(step=step, since=before[0], layers=unchanged, peers=peers)
