"""A Hugging Face model with the layers of one segment: transformers' own class, in which other segments' layers are
replaced by modules without weights.

Its `forward` is transformers' own, so masks, rotary positions, sliding windows, multipliers and softcaps are computed
in each segment as in the whole model, and its weights are read by transformers' own loader (renamed tensors, experts
that are merged on loading). What transformers does not document is used in this file and in `layer_plan.py` alone.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from thinpipe.config.huggingface_model import QuantizedBase
from thinpipe.core.errors import UserError
from thinpipe.models.hf.blocks import OtherSegmentsBlock, Pass
from thinpipe.models.hf.layer_plan import LayerPlan, UnsupportedModelError, find_plan
from thinpipe.models.hf.quantised import keep_packing, quantisation


class ZeroTable(nn.Module):
    """In place of an embedding of another segment: its output is not used, only its shape."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype

    def forward(self, ids: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return torch.zeros(*ids.shape, self.width, dtype=self.dtype, device=ids.device)


def causal_model_class(config: Any) -> Any:
    """transformers' class for causal language models with this configuration. Raises UnsupportedModelError."""
    try:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UnsupportedModelError(
            f"transformers has no causal language model for model type {config.model_type!r}"
        ) from None


def build_on_meta(config: Any, dtype: torch.dtype) -> Any:
    """The whole model without memory."""
    with torch.device("meta"), no_init_weights(), quiet():
        return causal_model_class(config)._from_config(config, dtype=dtype)


def load_hollow(
    config: Any,
    blocks: range,
    tensors: Mapping[str, Any],
    running: Pass,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantize: QuantizedBase | None = None,
) -> Any:
    """The model with these blocks and, at the ends, with the embeddings or with norm and head, and its weights.

    `tensors`: stored name -> what `[...]` reads the tensor from; only tensors of these layers are read. `running`: the
    pass to which other segments' blocks belong. `quantize`: how matrices of blocks are kept. Raises UserError if a
    tensor is missing.
    """
    hollow_class = _hollow_class(causal_model_class(config), blocks, running)
    with quiet():
        model, info = hollow_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            device_map={"": device},
            quantization_config=quantisation(quantize, device, dtype),
            output_loading_info=True,
            generation_config=transformers.GenerationConfig(),  # type: ignore[no-untyped-call]
        )
    keep_packing(model)
    _refuse_incomplete(model, info)
    if model.segment_blocks.start > 0:
        _remove_tables(model, model.segment_plan)  # one may have been kept, for the head that is tied to it
    return model


def _hollow_class(whole: Any, blocks: range, running: Pass) -> Any:
    """Subclass of a model class whose instances have only the given blocks. It has the name and the module of its base,
    by which transformers looks up conversions of weights and kinds of attention."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        whole.__init__(self, config, *args, **kwargs)
        self.segment_plan, self.segment_blocks = find_plan(self), blocks
        _hollow_out(self, self.segment_plan, blocks, running)

    return type(
        whole.__name__,
        (whole,),
        # Without exceptions from what must be there: transformers draws what it does not find.
        {"__init__": __init__, "__module__": whole.__module__, "_keys_to_ignore_on_load_missing": None},
    )


def _hollow_out(model: Any, plan: LayerPlan, blocks: range, running: Pass) -> None:
    layers = model.get_submodule(plan.blocks)
    is_last = blocks.stop == len(layers)
    for index, block in enumerate(layers):
        if index not in blocks:
            layers[index] = OtherSegmentsBlock(block, running)
    if not is_last:
        for path in plan.last:
            if not _is_empty(model.get_submodule(path)):
                model.set_submodule(path, nn.Identity())
        model.all_tied_weights_keys = {}  # the head is not here to be tied
    if blocks.start > 0:
        # transformers' loader fills a tied head through its embedding, which is removed after loading.
        keep = model.get_input_embeddings() if is_last and model.all_tied_weights_keys else None
        _remove_tables(model, plan, keep)


def _is_empty(module: nn.Module) -> bool:
    """Whether there are no tensors in it to save, as in a norm without weights, which may be used elsewhere too."""
    return not (any(True for _ in module.parameters()) or any(True for _ in module.buffers()))


def _remove_tables(model: Any, plan: LayerPlan, keep: nn.Module | None = None) -> None:
    for path in plan.first:
        module = model.get_submodule(path)
        if module is keep or isinstance(module, ZeroTable):
            continue
        is_table = isinstance(module, nn.Embedding)
        model.set_submodule(path, ZeroTable(module.embedding_dim, module.weight.dtype) if is_table else nn.Identity())


def _refuse_incomplete(model: Any, info: Mapping[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"the weights have no tensor for {missing[0]} ({len(missing)} are missing): use a folder with a whole "
            "causal language model, head included"
        )
    if wrong := [*info["mismatched_keys"], *info["error_msgs"]]:
        raise UserError(f"the weights do not fit the model: {wrong[0]}")
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise UnsupportedModelError(f"transformers' loader leaves {empty[0]} without a value")


class _NoReports(logging.Filter):
    """Drops transformers' list of tensors that it did not use, which are those of other segments, and its advice."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no reports of transformers inside."""
    from transformers.utils import logging as messages

    logger, drop = messages.get_logger("transformers"), _NoReports()
    had_bars = messages.is_progress_bar_enabled()
    handlers = list(logger.handlers)
    for handler in handlers:
        handler.addFilter(drop)
    messages.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(drop)
        if had_bars:
            messages.enable_progress_bar()  # type: ignore[no-untyped-call]
