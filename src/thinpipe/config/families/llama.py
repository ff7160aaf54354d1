"""Llama 2/3: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Weight names are Hugging Face's."""

from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, ClassVar

from thinpipe.config.huggingface_format import ConfigKey, FixedValue, HFConfig, HuggingFaceFormat
from thinpipe.config.model import ModelConfig, RopeScaling
from thinpipe.config.model_family import MLP, Attention, FamilySpec, Rotary
from thinpipe.core.errors import UserError

_ROPE_SCALING = {
    "factor": ConfigKey("factor", float),
    "low_freq_factor": ConfigKey("low_freq_factor", float),
    "high_freq_factor": ConfigKey("high_freq_factor", float),
    "original_max_position_embeddings": ConfigKey("original_max_position_embeddings"),
}


def _read_rest(stored: HFConfig) -> dict[str, Any]:
    dim, n_heads = ConfigKey("hidden_size").read(stored), ConfigKey("num_attention_heads").read(stored)
    head_dim = ConfigKey("head_dim", int, dim // n_heads).read(stored)
    if head_dim * n_heads != dim:
        raise UserError(
            f"head_dim {head_dim} is not supported, only hidden_size / num_attention_heads = {dim} / {n_heads}: "
            "use a model whose heads together are as wide as the model"
        )
    return {"n_kv_heads": ConfigKey("num_key_value_heads", int, n_heads).read(stored), **_read_rope(stored)}


def _read_rope(stored: HFConfig) -> dict[str, Any]:
    # transformers 5 has all keys in rope_parameters; transformers 4 has rope_theta next to rope_scaling.
    beside = {name: stored[name] for name in ("rope_theta", "partial_rotary_factor") if name in stored}
    rope = {**beside, **(stored.get("rope_scaling") or stored.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise UserError(f"rope type {rope_type!r} is not supported, only default and llama3: use a model trained so")
    if (turned := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"partial_rotary_factor = {turned} is not supported, only 1.0: use a model trained so")
    scaling = {field: key.read(rope) for field, key in _ROPE_SCALING.items()} if rope_type == "llama3" else None
    return {
        "rope_theta": ConfigKey("rope_theta", float, 10_000.0).read(rope),
        "rope_scaling": RopeScaling(**scaling) if scaling else None,
    }


def _write_rest(config: "LlamaConfig") -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "head_dim": config.head_dim,
        "num_key_value_heads": config.n_kv_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **asdict(scaling)} if scaling else None,
    }


LLAMA = FamilySpec(
    name="llama",
    norm="rms",
    token_embedding="embed_tokens",
    rotary=Rotary(),
    attention=Attention(
        name="self_attn",
        norm="input_layernorm",
        readers=("q_proj", "k_proj", "v_proj"),
        writer="o_proj",
        n_kv_heads=attrgetter("n_kv_heads"),
    ),
    mlp=MLP(
        name="mlp",
        norm="post_attention_layernorm",
        kind="swiglu",
        readers=("gate_proj", "up_proj"),
        writer="down_proj",
    ),
    final_norm="norm",
    huggingface=HuggingFaceFormat(
        architecture="LlamaForCausalLM",
        base="model.",
        blocks="layers.",
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
        read_rest=_read_rest,
        write_rest=_write_rest,
    ),
)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A Llama 2/3 decoder."""

    spec: ClassVar[FamilySpec] = LLAMA

    n_kv_heads: int
    hidden_dim: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_kv_heads < 1 or self.hidden_dim < 1:
            raise UserError(f"n_kv_heads {self.n_kv_heads} and hidden_dim {self.hidden_dim} must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")

    @classmethod
    def presets(cls) -> dict[str, ModelConfig]:
        return {
            "llama-tiny": cls(
                vocab_size=4096, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=352, max_seq_len=256
            ),
            "llama-10m": cls(
                vocab_size=4096, dim=256, n_layers=8, n_heads=8, n_kv_heads=4, hidden_dim=704, max_seq_len=512
            ),
            "llama-150m": cls(
                vocab_size=32_000, dim=768, n_layers=14, n_heads=12, n_kv_heads=12, hidden_dim=2048, max_seq_len=2048
            ),
            "llama-1b": cls(
                vocab_size=128_256,
                dim=2048,
                n_layers=16,
                n_heads=32,
                n_kv_heads=8,
                hidden_dim=8192,
                max_seq_len=4096,
                tied=True,
                rope_scaling=RopeScaling(factor=32.0),
            ),
            "llama-8b": cls(
                vocab_size=128_256,
                dim=4096,
                n_layers=32,
                n_heads=32,
                n_kv_heads=8,
                hidden_dim=14_336,
                max_seq_len=4096,
                rope_scaling=RopeScaling(factor=8.0),
            ),
            # The shape of Qwen2.5-32B (config.json of Qwen/Qwen2.5-32B on Hugging Face), without the biases of its
            # attention: to plan with.
            "llama-32b": cls(
                vocab_size=152_064,
                dim=5120,
                n_layers=64,
                n_heads=40,
                n_kv_heads=8,
                hidden_dim=27_648,
                max_seq_len=4096,
                rope_theta=1_000_000.0,
            ),
        }
