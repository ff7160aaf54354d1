"""Results of probes, kept on this machine by config.json and by the versions of what computes: a run of many processes,
or a run that begins again, does not try its model again."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.core.errors import DECODE_ERRORS, UserError
from thinpipe.core.files import write_atomically
from thinpipe.core.state_folder import state_folder
from thinpipe.models.hf.pretrained_config import config_text
from thinpipe.models.hf.probe import ProbeResult, probe, refuse_unsupported

_DECIDING = ("thinpipe", "torch", "transformers", "peft")


def probed(stored: Mapping[str, Any]) -> ProbeResult:
    """The result for the model of a config.json: the kept one, or that of a probe now, which is kept."""
    path = probe_path(stored)
    with suppress(OSError, *DECODE_ERRORS):
        return msgspec.json.decode(path.read_bytes(), type=ProbeResult)
    result = probe(stored)
    with suppress(OSError):  # a folder that cannot be written costs the next run a probe
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(result))
    return result


def probe_path(stored: Mapping[str, Any]) -> Path:
    """File of a result."""
    deciding = "\n".join((*(f"{name} {_version(name)}" for name in _DECIDING), config_text(stored)))
    return state_folder() / "probes" / f"{hashlib.sha256(deciding.encode()).hexdigest()[:24]}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def require_probed(config: HuggingFaceModelConfig) -> None:
    """Raises UserError unless the probe shows that the model can be trained in its segments, with its adapters if it
    has any. A model that is not cut is transformers' own and needs no proof."""
    if len(config.segments) == 1:
        return
    result = probed(config.stored)
    refuse_unsupported(result)
    failed = next((check for check in result.checks if check.name == "LoRA" and not check.works), None)
    if config.lora is not None and failed is not None:
        raise UserError(f"LoRA does not work with {result.model_type} in segments: {failed.detail}")
