"""Converts between Hugging Face's config.json and ModelConfig, for Llama and GPT-2. No weights, and no torch.

A setting that thinpipe's models do not support raises a UserError that names it. Generation settings and the tokenizer
are not part of a model configuration and are not read.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinpipe.config.model import GPT2Config, LlamaConfig, ModelConfig, RopeScaling
from thinpipe.core.errors import UserError

HFConfig = Mapping[str, Any]
"""Parsed content of a config.json."""

PROJECTION_MODEL_TYPE = "thinpipe_projection"
"""model_type of folders written by `models.hf.projection`, which cannot be imported."""


@dataclass(frozen=True)
class ConfigKey:
    """Hugging Face key that corresponds to one field of a ModelConfig. Without a default, the key is required."""

    name: str
    kind: type[int] | type[float] | type[bool] = int
    default: float | bool | None = None


@dataclass(frozen=True)
class FixedValue:
    """Supported values of a Hugging Face key that has no field in ModelConfig. The first one is Hugging Face's default
    and is written on export."""

    values: tuple[Any, ...]
    logits_depend: bool = True


@dataclass(frozen=True)
class Family:
    config: type[ModelConfig]
    architecture: str
    keys: dict[str, ConfigKey]
    fixed: dict[str, FixedValue]
    read_rest: Callable[[HFConfig], dict[str, Any]]
    """Reads the fields that do not correspond to a single key; `write_rest` writes them."""
    write_rest: Callable[[Any], dict[str, Any]]


def load_config(folder: str | Path) -> ModelConfig:
    """The configuration of the model in a Hugging Face folder: dense and without boundaries. Raises UserError.

    Change `boundaries` or `tied` with `dataclasses.replace`; for Llama `max_seq_len` too (GPT-2 has a row for each
    position).
    """
    path = Path(folder) / "config.json"
    stored = read_json_object(path)
    try:
        if stored.get("model_type") == PROJECTION_MODEL_TYPE:
            raise UserError(
                "this is an export of a model with a boundary projection, which is not read back: to train on, set "
                "model.initial to "
                "the folder of the run that it came from"
            )
        family = FAMILIES.get(stored.get("model_type", ""))
        if family is None:
            raise UserError(f"model_type {stored.get('model_type')!r} is not supported, only {' and '.join(FAMILIES)}")
        _refuse_unsupported(stored, family)
        read: dict[str, Any] = {field: _value(stored, key) for field, key in family.keys.items()}
        return family.config(**read, **family.read_rest(stored))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def hf_config(config: ModelConfig, end_of_text_id: int | None = None) -> dict[str, Any]:
    """Content of config.json for a dense model, in a layout that transformers 4 and 5 both read."""
    model_type, family = next(item for item in FAMILIES.items() if item[1].config is type(config))
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        **{key.name: getattr(config, field) for field, key in family.keys.items()},
        **{name: fixed.values[0] for name, fixed in family.fixed.items() if fixed.values[0] is not None},
        **family.write_rest(config),
        # Without these keys, transformers uses the original tokenizer's ids, which a small vocabulary may not have.
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
    }


def read_json_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file whose content is an object. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a folder as `save_pretrained` or `hf download` write it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(content).__name__}: download it again")
    return content


def _value(stored: HFConfig, key: ConfigKey) -> Any:
    value = stored.get(key.name)
    if value is None:
        value = key.default
    if value is None:
        raise UserError(f"{key.name} is missing: add it, with the value that the model was trained with")
    accepted: tuple[type, ...] = (int, float) if key.kind is float else (key.kind,)
    # bool is a subclass of int. Sizes below 1 are rejected here: later they would raise ZeroDivisionError.
    is_kind = isinstance(value, accepted) and isinstance(value, bool) == (key.kind is bool)
    if not is_kind or (key.kind is int and value < 1):
        kind = {int: "a whole number above 0", float: "a number", bool: "true or false"}[key.kind]
        raise UserError(f"{key.name} should be {kind}, not {value!r}")
    return key.kind(value)


def _refuse_unsupported(stored: HFConfig, family: Family) -> None:
    for name, fixed in family.fixed.items():
        if stored.get(name, fixed.values[0]) in fixed.values:
            continue
        remedy = "use a model trained that way" if fixed.logits_depend else "set it so, the logits do not depend on it"
        supported = " or ".join(json.dumps(value) for value in fixed.values)
        raise UserError(f"{name} = {json.dumps(stored[name])} is not supported, only {supported}: {remedy}")


def _read_llama(stored: HFConfig) -> dict[str, Any]:
    dim, n_heads = _value(stored, ConfigKey("hidden_size")), _value(stored, ConfigKey("num_attention_heads"))
    head_dim = _value(stored, ConfigKey("head_dim", int, dim // n_heads))
    if head_dim * n_heads != dim:
        raise UserError(
            f"head_dim {head_dim} is not supported, only hidden_size / num_attention_heads = {dim} / {n_heads}: "
            "use a model whose heads together are as wide as the model"
        )
    return {"n_kv_heads": _value(stored, ConfigKey("num_key_value_heads", int, n_heads)), **_read_rope(stored)}


def _read_rope(stored: HFConfig) -> dict[str, Any]:
    # transformers 5 has all keys in rope_parameters; transformers 4 has rope_theta next to rope_scaling.
    beside = {name: stored[name] for name in ("rope_theta", "partial_rotary_factor") if name in stored}
    rope = {**beside, **(stored.get("rope_scaling") or stored.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise UserError(f"rope type {rope_type!r} is not supported, only default and llama3: use a model trained so")
    if (turned := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"partial_rotary_factor = {turned} is not supported, only 1.0: use a model trained so")
    scaling = {field: _value(rope, key) for field, key in ROPE_SCALING.items()} if rope_type == "llama3" else None
    return {
        "rope_theta": _value(rope, ConfigKey("rope_theta", float, 10_000.0)),
        "rope_scaling": RopeScaling(**scaling) if scaling else None,
    }


def _write_llama(config: LlamaConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "head_dim": config.head_dim,
        "num_key_value_heads": config.n_kv_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **asdict(scaling)} if scaling else None,
    }


def _read_gpt2(stored: HFConfig) -> dict[str, Any]:
    dim = _value(stored, ConfigKey("n_embd"))
    hidden_dim = _value(stored, ConfigKey("n_inner", int, 4 * dim))
    if hidden_dim != 4 * dim:
        raise UserError(f"n_inner = {hidden_dim} is not supported, only 4 n_embd = {4 * dim}: use a model trained so")
    rates = {name: _value(stored, ConfigKey(name, float, 0.1)) for name in GPT2_DROPOUT}
    if len(set(rates.values())) > 1:
        raise UserError(
            f"{rates} is not supported, only one rate for all three: set it, the logits do not depend on it"
        )
    return {"dropout": rates["resid_pdrop"]}


def _write_gpt2(config: GPT2Config) -> dict[str, Any]:
    return dict.fromkeys(GPT2_DROPOUT, config.dropout)


ROPE_SCALING = {
    "factor": ConfigKey("factor", float),
    "low_freq_factor": ConfigKey("low_freq_factor", float),
    "high_freq_factor": ConfigKey("high_freq_factor", float),
    "original_max_position_embeddings": ConfigKey("original_max_position_embeddings"),
}
GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
FAMILIES = {
    "llama": Family(
        config=LlamaConfig,
        architecture="LlamaForCausalLM",
        keys={
            "vocab_size": ConfigKey("vocab_size"),
            "dim": ConfigKey("hidden_size"),
            "n_layers": ConfigKey("num_hidden_layers"),
            "n_heads": ConfigKey("num_attention_heads"),
            "max_seq_len": ConfigKey("max_position_embeddings"),
            "norm_eps": ConfigKey("rms_norm_eps", float, 1e-6),
            "init_std": ConfigKey("initializer_range", float, 0.02),
            "tied": ConfigKey("tie_word_embeddings", bool, False),
            "hidden_dim": ConfigKey("intermediate_size"),
        },
        fixed={
            "hidden_act": FixedValue(("silu",)),
            "attention_bias": FixedValue((False,)),
            "mlp_bias": FixedValue((False,)),
            "attention_dropout": FixedValue((0.0,), logits_depend=False),
            "quantization_config": FixedValue((None,)),
        },
        read_rest=_read_llama,
        write_rest=_write_llama,
    ),
    "gpt2": Family(
        config=GPT2Config,
        architecture="GPT2LMHeadModel",
        keys={
            "vocab_size": ConfigKey("vocab_size"),
            "dim": ConfigKey("n_embd"),
            "n_layers": ConfigKey("n_layer"),
            "n_heads": ConfigKey("n_head"),
            "max_seq_len": ConfigKey("n_positions"),
            "norm_eps": ConfigKey("layer_norm_epsilon", float, 1e-5),
            "init_std": ConfigKey("initializer_range", float, 0.02),
            "tied": ConfigKey("tie_word_embeddings", bool, True),
        },
        fixed={
            "activation_function": FixedValue(("gelu_new", "gelu_pytorch_tanh")),
            "scale_attn_weights": FixedValue((True,)),
            "scale_attn_by_inverse_layer_idx": FixedValue((False,)),
            "reorder_and_upcast_attn": FixedValue((False,), logits_depend=False),
            "add_cross_attention": FixedValue((False,)),
            "quantization_config": FixedValue((None,)),
        },
        read_rest=_read_gpt2,
        write_rest=_write_gpt2,
    ),
}
