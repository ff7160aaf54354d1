"""Messages that the hub sends to all peers at once, on the subjects `bcast.<name>`. The server lets nobody else publish
there, so peers believe them."""

import msgspec

from thinpipe.core.bounds import GenerationNumber, LongText, Name

LOST, GENERATION_OVER, STOP = "lost", "generation_over", "stop"
"""Names of the broadcasts. STOP, which asks all peers to save and to stop, has no content."""


class PeerLost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A peer is lost: nobody need wait for it."""

    peer: Name


class GenerationOver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A generation is over, also for peers that have noticed nothing."""

    generation: GenerationNumber
    reason: LongText
