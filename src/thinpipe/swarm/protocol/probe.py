"""Messages of the bandwidth probe, with which a peer measures its link to the hub, and the hub's handler for them."""

import os
import random
from typing import Annotated

import msgspec

from thinpipe.core.foreign import decode_foreign

SERVICE = "probe"
MAX_PROBE_NBYTES = 1 << 20
"""Maximum size of a reply, in bytes."""
PIECE_NBYTES = 256 << 10
"""Maximum payload of a probe message that an honest machine sends, in bytes."""
_RANDOM_BYTES = os.urandom(2 * MAX_PROBE_NBYTES)
"""Source of payloads that nothing on the network path can compress."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a reply of `answer_nbytes` bytes; its own `payload` loads the uplink."""

    answer_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROBE_NBYTES)]
    payload: Annotated[bytes, msgspec.Meta(max_length=2 << 20)] = b""


async def probe_service(peer: str, data: bytes) -> bytes:  # noqa: ARG001  all peers may ask
    """Handler at the hub. The broker limits the size of a request."""
    return random_bytes(decode_foreign(data, Probe).answer_nbytes)


def random_bytes(nbytes: int) -> bytes:
    """Incompressible payload of this many bytes."""
    start = random.randrange(len(_RANDOM_BYTES) - nbytes + 1)
    return _RANDOM_BYTES[start : start + nbytes]
