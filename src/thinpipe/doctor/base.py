"""Checks of a run that trains a Hugging Face model: the base and its hash, disk space for its download, the kernel of
attention, quantisation on this device, and who can read the data."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thinpipe.checkpoint import Checkpoint
from thinpipe.checkpoint.state import refuse_other_base
from thinpipe.config.huggingface_model import HuggingFaceModelConfig, QuantizedBase
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.extras import install_hint
from thinpipe.core.units import format_bytes
from thinpipe.device.choice import choose_device
from thinpipe.doctor.finding import Finding, ok, problem, warning
from thinpipe.doctor.machine import missing_extras
from thinpipe.models.hf.model_hub import HubModel
from thinpipe.planning.stored_model import StoredModel, stored_model_of
from thinpipe.swarm.hub.who_reads import who_reads
from thinpipe.training.data_loading import DatasetInfo
from thinpipe.training.memory_check import kernel_for, local_fit
from thinpipe.training.model_choice import choose_model

_CORRECT = "Correct the run's settings."


@dataclass(frozen=True, kw_only=True)
class Base:
    """The base of a run, as far as it can be known here."""

    model: HuggingFaceModelConfig
    shapes: StoredModel
    hub: HubModel | None
    """None: the base is a folder."""
    absent: tuple[str, ...]
    """Files of weights on the hub that are not in the cache of this machine."""
    has_weights: bool


def find_base(config: RunConfig, info: DatasetInfo | None) -> Base:
    """Downloads no weights. `info`: of the run's tokens, if they are here. Raises UserError."""
    model = choose_model(config, info.vocab_size if info else 0, None, reads_tokens=info is not None)
    assert isinstance(model, HuggingFaceModelConfig)
    hub, shapes = HubModel.of(model.source), stored_model_of(config)
    absent = () if hub is None else tuple(file for file in hub.weight_files() if not hub.has(file))
    if shapes is not None:
        return Base(model=model, shapes=shapes, hub=hub, absent=absent, has_weights=True)
    from thinpipe.models.hf.base_shapes import base_shapes  # transformers takes seconds to import

    shapes = StoredModel.of_run(model, base_shapes(model.stored))
    return Base(model=model, shapes=shapes, hub=None, absent=(), has_weights=False)


def base_findings(
    config: RunConfig, base: Base, newest: Checkpoint | None, *, chats: bool, keep_ends: Sequence[str]
) -> Iterator[Finding]:
    """`newest`: checkpoint from which the run would go on; `keep_ends`: machines of the hub's owner."""
    yield _base(base, newest)
    if base.hub is not None and base.absent:
        yield _download(base.hub, base.absent)
    try:
        device = choose_device(config.training.device)
    except UserError as error:
        yield problem("attention", str(error), _CORRECT)
    else:
        yield _attention(local_fit(config, base.shapes, device)[0], base.model, device)
        yield _quantised(config.model.quantize_base, device)
    yield ok("who reads", who_reads(base.model, config.boundary, chats=chats, keep_ends=keep_ends))


def base_problem(error: UserError) -> Finding:
    """A base that cannot be found, is not supported, or does not fit the tokens."""
    return problem("base", str(error), _CORRECT)


def _base(base: Base, newest: Checkpoint | None) -> Finding:
    from thinpipe.models.hf.model_of_run import state_of_model

    model = base.model
    text = f"{model.source}: {model.stored.get('model_type')}, {model.n_layers} blocks"
    if not base.has_weights:
        return problem("base", f"{text}, but there are no safetensors files", "Download the whole folder.")
    if base.absent:
        return ok("base", f"{text}; its hash is compared when its files are here")
    try:
        sha256 = state_of_model(model)[0].base_sha256
        if newest is not None:
            refuse_other_base(model.source, sha256, newest)
    except UserError as error:
        return problem("base", str(error), "Restore the base that the run began with, or download it again.")
    compared = f", as {newest.path} has it" if newest is not None else ""
    return ok("base", f"{text}; sha256 {sha256[:16]}...{compared}")


def _download(hub: HubModel, absent: Sequence[str]) -> Finding:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    place = next(each for each in (cache, *cache.parents) if each.is_dir())
    nbytes, free = sum(hub.size(file) or 0 for file in absent), shutil.disk_usage(place).free
    text = (
        f"{len(absent)} file(s) of {format_bytes(nbytes)} to download into {cache}, with {format_bytes(free)} free; a "
        "process takes those with its own layers"
    )
    if free < nbytes:
        return warning("download", text, "Free disk space, or set HF_HOME to a folder on another disk.")
    return ok("download", text)


def _attention(config: RunConfig, model: HuggingFaceModelConfig, device: torch.device) -> Finding:
    """`config`: with the precision of this device."""
    from thinpipe.models.hf.hollow import build_on_meta
    from thinpipe.models.hf.pretrained_config import attention_heads, transformers_config

    used = str(build_on_meta(transformers_config(model.stored), torch.float32).config._attn_implementation)
    keeps = "which keeps tokens x tokens scores of each head"
    if used != "sdpa":
        return ok("attention", f"{used}, as transformers has it for this model, {keeps}")
    if kernel_for(config.planned_recipe, attention_heads(model), device) == "math":
        return ok("attention", f"sdpa, with torch's math kernel on {device}, {keeps}")
    return ok("attention", f"sdpa, with a fused kernel of torch on {device}")


def _quantised(asked: QuantizedBase | None, device: torch.device) -> Finding:
    """Whether this device can keep a base in 4 or 8 bits; a problem if the run wants that."""
    kinds: tuple[QuantizedBase, ...] = ("nf4", "int8") if asked is None else (asked,)
    if missing_extras(["qlora"]):
        text, fix = "bitsandbytes is not installed", install_hint("qlora")
        if asked is None:
            return ok("quantised base", text, f"If you want it: {fix}.")
        return problem("quantised base", text, f"Run {fix}.")
    from thinpipe.models.hf.quantised import as_quantised, quantisation

    try:
        for kind in kinds:
            quantisation(kind, device, torch.float32)
            as_quantised(torch.ones(64, 64, device=device), kind)
    except Exception as error:  # of the library and of its kernels for this device
        text = f"not on {device}: {error}"
        if asked is None:
            return ok("quantised base", text)
        return problem("quantised base", text, "Leave model.quantize_base out, or set training.device.")
    return ok("quantised base", f"{' and '.join(kinds)} by bitsandbytes on {device}")
