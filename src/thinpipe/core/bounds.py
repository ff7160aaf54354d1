"""Types of the fields of everything that another machine sends, with the range that a real machine never leaves.

A value outside is refused while it is decoded (`core.foreign`), not moved into the range: who sends it is broken or
lies, and a number that nobody has measured helps nobody. No bound excludes what an honest machine could measure; each
is narrow enough for sums, products and quotients of a few such numbers to stay finite.
"""

from typing import Annotated

from msgspec import Meta

VERBATIM = {"verbatim": True}
"""`extra` of a text that is compared or parsed as it came, and so is not made plain. Never shown to anybody."""

# Texts

ShortText = Annotated[str, Meta(max_length=200)]
"""Name of a thing, as a device. Made plain while decoding (`foreign.sanitize`)."""
Text = Annotated[str, Meta(max_length=500)]
"""A few words for people to read, as an error. Made plain while decoding."""
LongText = Annotated[str, Meta(max_length=5000)]
"""Sentences for people to read. Made plain while decoding."""
Word = Annotated[str, Meta(max_length=200, pattern=r"^[\x20-\x7e]*\Z")]
"""Something to compare: an id, a version, a hash of any kind."""
Name = Annotated[str, Meta(max_length=32, pattern=r"^[a-z0-9]*\Z")]
"""Name of a peer, or nothing."""
Jwt = Annotated[str, Meta(max_length=2000, pattern=r"^[A-Za-z0-9_.-]*\Z")]
"""A JWT of NATS, or nothing."""
Toml = Annotated[str, Meta(max_length=1 << 18, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*\Z", extra=VERBATIM)]
"""Settings as TOML: of control characters it has line ends and tabs."""
Sha256 = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""A hash in hex, or nothing."""
_PATH = r"(?! )(?!.* (/|\Z))(?!.*/ )(?!(.*/)?[ .]*(/|\Z))[^\x00-\x1f\x7f\\:*?\"<>|]+\Z"
FilePath = Annotated[str, Meta(max_length=512, pattern=f"^{_PATH}")]
"""Path of a file below a folder that both sides know, with "/" between its parts. It stays in that folder on every
operating system."""
TokenizerFile = Annotated[str, Meta(max_length=512, pattern=f"^tokenizer/{_PATH}")]
"""Path of a file of the tokenizer."""
_LAYER_FILE = r"^(?!(?:con|prn|aux|nul|com[0-9]|lpt[0-9])\.)[a-z0-9][a-z0-9.]{0,99}\.safetensors\Z"
LayerFileName = Annotated[str, Meta(max_length=200, pattern=_LAYER_FILE)]
"""Name of a file of a checkpoint. None opens a device on Windows."""

# Whole numbers

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""How many of anything; a number of a step. JSON and float64 hold all of these."""
GenerationNumber = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of a generation or an incarnation: as the header of a frame holds it, in 32 bits."""
Nbytes = Annotated[int, Meta(ge=0, le=1 << 50)]
"""Size of a file, a memory or a message."""

MAX_FILES = 10_000
"""Files of a checkpoint, or of anything else."""
MAX_REPLICAS = 1024
"""Pipelines that train at the same time."""
MAX_SEGMENTS = 4096
"""Segments of a model."""
SegmentIndex = Annotated[int, Meta(ge=0, le=MAX_SEGMENTS)]
"""Index of a segment or a boundary."""

# Measured quantities

BitRate = Annotated[float, Meta(ge=1e3, le=1e15)]
"""Bits per second: from a fiftieth of a modem to a thousand times the fastest link of today."""
HubRate = Annotated[float, Meta(ge=1, le=1e19)]
"""Bits per second of a hub's link: as its owner says, or the sum of what all peers have measured."""
Flops = Annotated[float, Meta(ge=1e6, le=1e21)]
"""Floating-point operations per second: from far below any processor to a whole data centre."""
ByteRate = Annotated[float, Meta(ge=1e-6, le=1e15)]
"""Bytes per second that somebody may use: a share of a link."""
Latency = Annotated[float, Meta(ge=0, le=60)]
"""Round-trip time in seconds. A link on which a question takes a minute carries no training."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration or, below 30 years, a time."""
Clock = Annotated[float, Meta(ge=0, le=1e11)]
"""Seconds since 1970."""
Real = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""Any other number: finite, also when it is multiplied."""
