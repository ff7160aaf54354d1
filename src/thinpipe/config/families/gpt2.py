"""GPT-2: LayerNorm, learned positions, GELU, biases. Weight names are Hugging Face's.

In a subspace model, positions are P_fixed (on every segment, from a seed) plus trainable coordinates (first segment
only), and the biases of residual writers are coordinates too.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from thinpipe.config.huggingface_format import ConfigKey, FixedValue, HFConfig, HuggingFaceFormat
from thinpipe.config.model import ModelConfig
from thinpipe.config.model_family import MLP, Attention, FamilySpec
from thinpipe.core.errors import UserError

_DROPOUT_KEYS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def _read_rest(stored: HFConfig) -> dict[str, Any]:
    dim = ConfigKey("n_embd").read(stored)
    hidden_dim = ConfigKey("n_inner", int, 4 * dim).read(stored)
    if hidden_dim != 4 * dim:
        raise UserError(f"n_inner = {hidden_dim} is not supported, only 4 n_embd = {4 * dim}: use a model trained so")
    rates = {name: ConfigKey(name, float, 0.1).read(stored) for name in _DROPOUT_KEYS}
    if len(set(rates.values())) > 1:
        raise UserError(
            f"{rates} is not supported, only one rate for all three: set it, the logits do not depend on it"
        )
    return {"dropout": rates["resid_pdrop"]}


def _write_rest(config: "GPT2Config") -> dict[str, Any]:
    return dict.fromkeys(_DROPOUT_KEYS, config.dropout)


GPT2 = FamilySpec(
    name="gpt2",
    norm="layer",
    token_embedding="wte",
    position_embedding="wpe",
    attention=Attention(
        name="attn", norm="ln_1", readers=("c_attn",), writer="c_proj", reader_bias=True, writer_bias=True
    ),
    mlp=MLP(
        name="mlp",
        norm="ln_2",
        kind="gelu_tanh",
        readers=("c_fc",),
        writer="c_proj",
        reader_bias=True,
        writer_bias=True,
    ),
    final_norm="ln_f",
    dropout=attrgetter("dropout"),
    huggingface=HuggingFaceFormat(
        architecture="GPT2LMHeadModel",
        base="transformer.",
        blocks="h.",
        transposed=("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
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
        read_rest=_read_rest,
        write_rest=_write_rest,
    ),
)


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """GPT-2; the MLP is four times as wide as the model."""

    spec: ClassVar[FamilySpec] = GPT2

    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout {self.dropout} must be at least 0 and below 1")

    @property
    def hidden_dim(self) -> int:
        return 4 * self.dim

    @classmethod
    def presets(cls) -> dict[str, ModelConfig]:
        return {
            "gpt2-tiny": cls(vocab_size=4096, dim=128, n_layers=4, n_heads=4, max_seq_len=256),
            "gpt2": cls(vocab_size=50_257, dim=768, n_layers=12, n_heads=12, max_seq_len=1024, tied=True),
        }
