"""Which modules of a Hugging Face decoder belong to its first segment, to its blocks and to its last segment.

Taken from transformers' own `base_model_pp_plan`, or from a table of ours for model types without one. Never guessed
from the order of modules: a model type that is in neither is refused, and so is a model with a parameter that the plan
gives to nobody (shared or per-layer tables), because a segment without it would compute something else.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from thinpipe.core.errors import UserError


class UnsupportedModelError(UserError):
    """A model that cannot be cut into segments, or whose segments do not compute what the whole computes."""


@dataclass(frozen=True)
class LayerPlan:
    """Paths of modules in a causal language model, such as `model.embed_tokens`."""

    first: tuple[str, ...]
    """Modules before the blocks: embeddings."""
    blocks: str
    """The list of blocks."""
    last: tuple[str, ...]
    """Modules after the blocks: final norm and output head."""

    def huggingface_name(self, name: str) -> str:
        """Hugging Face's name of the parameter or buffer that a segment calls `name`."""
        layer, rest = name.split(".", 1)
        if layer == "blocks":
            return f"{self.blocks}.{rest}"
        module, rest = rest.split(".", 1)
        path = next(path for path in getattr(self, layer) if leaf(path) == module)
        return f"{path}.{rest}"


def leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _plan(base: str, first: tuple[str, ...], blocks: str, norm: str, head: str = "lm_head") -> LayerPlan:
    return LayerPlan(tuple(f"{base}.{name}" for name in first), f"{base}.{blocks}", (f"{base}.{norm}", head))


_GPT2 = _plan("transformer", ("wte", "wpe"), "h", "ln_f")
_GPTJ = _plan("transformer", ("wte",), "h", "ln_f")
_LLAMA = _plan("model", ("embed_tokens",), "layers", "norm")
_JAMBA = _plan("model", ("embed_tokens",), "layers", "final_layernorm")
_MAMBA = _plan("backbone", ("embeddings",), "layers", "norm_f")

OWN_PLANS: Mapping[str, LayerPlan] = {
    "bamba": _JAMBA,
    "biogpt": _plan("biogpt", ("embed_tokens", "embed_positions"), "layers", "layer_norm", "output_projection"),
    "bitnet": _LLAMA,
    "bloom": _plan("transformer", ("word_embeddings", "word_embeddings_layernorm"), "h", "ln_f"),
    "codegen": _GPTJ,
    "diffllama": _LLAMA,
    "falcon": _plan("transformer", ("word_embeddings",), "h", "ln_f"),
    "falcon_mamba": _MAMBA,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": _GPT2,
    "gpt_neox_japanese": _plan("gpt_neox_japanese", ("embed_in",), "layers", "final_layer_norm", "embed_out"),
    "gptj": _GPTJ,
    "granitemoe": _LLAMA,
    "granitemoe_swa": _LLAMA,
    "granitemoehybrid": _LLAMA,
    "granitemoeshared": _LLAMA,
    "jamba": _JAMBA,
    "jetmoe": _LLAMA,
    "lfm2": _plan("model", ("embed_tokens",), "layers", "embedding_norm"),
    "lfm2_moe": _plan("model", ("embed_tokens",), "layers", "embedding_norm"),
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "mpt": _plan("transformer", ("wte",), "blocks", "norm_f"),
    "nanochat": _LLAMA,
    "nemotron": _LLAMA,
    "nemotron_h": _plan("model", ("embeddings",), "layers", "norm_f"),
    "olmoe": _LLAMA,
    "persimmon": _JAMBA,
    "phimoe": _LLAMA,
    "recurrent_gemma": _plan("model", ("embed_tokens",), "layers", "final_norm"),
    "stablelm": _LLAMA,
}
"""Plans of model types for which transformers has none. The probe proves each (`models/hf/probe.py`)."""


def find_plan(model: Any) -> LayerPlan:
    """The plan of a causal language model of transformers. Raises UnsupportedModelError."""
    plan = _own_plan_of_transformers(model) or OWN_PLANS.get(model.config.model_type)
    if plan is None:
        raise UnsupportedModelError(
            f"model type {model.config.model_type!r} cannot be cut into segments: there is no pipeline plan for it, in "
            "transformers or here; take a decoder that writes text, such as a Llama or Qwen"
        )
    _refuse_unowned(model, plan)
    return plan


def _own_plan_of_transformers(model: Any) -> LayerPlan | None:
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    names = list(getattr(base, "_pp_plan", None) or base.config.base_model_pp_plan or ())
    lists = [name for name in names if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1:
        return None
    at = names.index(lists[0])
    head = [] if base is model else list(type(model)._pp_plan or ())
    return LayerPlan(
        first=tuple(prefix + name for name in names[:at]),
        blocks=prefix + lists[0],
        last=(*(prefix + name for name in names[at + 1 :]), *head),
    )


def modules_of(model: nn.Module, plan: LayerPlan) -> Iterator[nn.Module]:
    """Every module that some segment owns."""
    for path in (*plan.first, *plan.last):
        yield model.get_submodule(path)
    yield from _blocks(model, plan)


def _blocks(model: nn.Module, plan: LayerPlan) -> nn.ModuleList:
    blocks = model.get_submodule(plan.blocks)
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _refuse_unowned(model: Any, plan: LayerPlan) -> None:
    counted = model.config.num_hidden_layers
    if len(_blocks(model, plan)) != counted:
        raise UnsupportedModelError(f"{plan.blocks} has {len(_blocks(model, plan))} blocks, config.json says {counted}")
    owned = {id(parameter) for module in modules_of(model, plan) for parameter in module.parameters()}
    unowned = next((name for name, parameter in model.named_parameters() if id(parameter) not in owned), None)
    if unowned is not None:
        raise UnsupportedModelError(
            f"no segment would own {unowned}: the pipeline plan of {model.config.model_type} covers only "
            f"{', '.join(plan.first)}, {plan.blocks} and {', '.join(plan.last)}"
        )
