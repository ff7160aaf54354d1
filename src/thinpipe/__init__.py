"""thinpipe trains language models whose layers are spread over machines joined by ordinary internet links.

The names below are the public API, described in docs/reference/api.md; everything else may change in any release. A
name is imported from its module when it is first used, so `import thinpipe` imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinpipe.api.model import LoadedModel, load
    from thinpipe.api.planning import plan
    from thinpipe.api.run import Losses, Run, train
    from thinpipe.api.tokens import tokenize
    from thinpipe.boundary.codec import Codec, codec
    from thinpipe.boundary.contract import Compressor, MessageContext, MessageShape
    from thinpipe.boundary.packing import pack_bits, unpack_bits
    from thinpipe.boundary.registry import register_compressor
    from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
    from thinpipe.config.run import RunConfig
    from thinpipe.core.errors import RunFailedError, UserError
    from thinpipe.core.events import Saved, Started, Step, Stopped, Validated
    from thinpipe.pipeline.compressed_sequential import CompressedSequential
    from thinpipe.pipeline.compressed_stage import CompressedStage
    from thinpipe.planning.planner import Plan

__version__: str
"""Version of the installed package, from its newest git tag; read when it is first used."""
_VERSION_NOT_INSTALLED = "0.2.0.dev0"
"""Version of sources that are imported without having been installed."""

_MODULES = {
    "BoundaryConfig": "thinpipe.config.boundary",
    "Codec": "thinpipe.boundary.codec",
    "CompressedSequential": "thinpipe.pipeline.compressed_sequential",
    "CompressedStage": "thinpipe.pipeline.compressed_stage",
    "CompressionConfig": "thinpipe.config.boundary",
    "Compressor": "thinpipe.boundary.contract",
    "LoadedModel": "thinpipe.api.model",
    "Losses": "thinpipe.api.run",
    "MessageContext": "thinpipe.boundary.contract",
    "MessageShape": "thinpipe.boundary.contract",
    "Plan": "thinpipe.planning.planner",
    "Run": "thinpipe.api.run",
    "RunConfig": "thinpipe.config.run",
    "RunFailedError": "thinpipe.core.errors",
    "Saved": "thinpipe.core.events",
    "Started": "thinpipe.core.events",
    "Step": "thinpipe.core.events",
    "Stopped": "thinpipe.core.events",
    "UserError": "thinpipe.core.errors",
    "Validated": "thinpipe.core.events",
    "codec": "thinpipe.boundary.codec",
    "load": "thinpipe.api.model",
    "pack_bits": "thinpipe.boundary.packing",
    "plan": "thinpipe.api.planning",
    "register_compressor": "thinpipe.boundary.registry",
    "tokenize": "thinpipe.api.tokens",
    "train": "thinpipe.api.run",
    "unpack_bits": "thinpipe.boundary.packing",
}
"""Module of every public name."""

__all__ = [
    "BoundaryConfig",
    "Codec",
    "CompressedSequential",
    "CompressedStage",
    "CompressionConfig",
    "Compressor",
    "LoadedModel",
    "Losses",
    "MessageContext",
    "MessageShape",
    "Plan",
    "Run",
    "RunConfig",
    "RunFailedError",
    "Saved",
    "Started",
    "Step",
    "Stopped",
    "UserError",
    "Validated",
    "codec",
    "load",
    "pack_bits",
    "plan",
    "register_compressor",
    "tokenize",
    "train",
    "unpack_bits",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        found = _installed_version()
        globals()[name] = found
        return found
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("thinpipe")
    except PackageNotFoundError:
        return _VERSION_NOT_INSTALLED


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
