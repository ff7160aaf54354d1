"""A small model with the structure of a given one: config.json with smaller numbers and every other choice as it is.

Kinds of layers, norms, rotary scaling, windows, softcaps, multipliers, experts and ties stay; widths, heads, experts,
vocabulary and the number of blocks become small. So a model can be tried in a second, and without its weights.
"""

from collections.abc import Mapping
from typing import Any

from thinpipe.models.hf.pretrained_config import transformers_config

BLOCKS, VOCABULARY, WIDTH, HEADS, WINDOW = 8, 512, 64, 4, 16

SIZES: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "embedding_size": WIDTH,
    "attention_hidden_size": WIDTH,
    "lru_width": WIDTH,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "d_inner": 96,
    "shared_intermediate_size": 48,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "attention_window_size": WINDOW,
    "window_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "moe_layer_start_index": 2,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_dt_rank": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 8,
    "num_heads": 8,
    "rotary_dim": 8,
    "hidden_size_per_layer_input": 16,
}
"""Largest value of each size in a small model, under the names that most configurations of transformers use."""
TOKENS: Mapping[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "num_query_groups")


def shrink(stored: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a small model with the structure of the given one. Raises UnsupportedModelError."""
    given = transformers_config(stored)
    common_names = {own: common for common, own in given.attribute_map.items()}
    kept = _blocks_to_keep(given)
    small = dict(given.to_dict())
    for own, value in given.to_dict().items():
        name = common_names.get(own, own)
        if name in SIZES and _is_number(value):
            small[own] = min(value, SIZES[name])
        elif name in TOKENS and value is not None:
            small[own] = TOKENS[name]
        elif name == "num_hidden_layers":
            small[own] = len(kept)
        elif name == "num_attention_heads" and _is_number(value):
            small[own] = HEADS
        elif name in _KEY_HEADS and _is_number(value):
            small[own] = _key_heads(value, given.num_attention_heads)
        elif name == "head_dim" and _is_number(value):
            small[own] = _head_dim(value, given)
        elif isinstance(value, list):
            small[own] = _shrink_list(value, given.num_hidden_layers, kept)
    _shrink_rotary_factors(given, small)
    return small


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _key_heads(count: int, heads: int) -> int:
    """One for all queries, one for each, or one for two."""
    return {1: 1, heads: HEADS}.get(count, HEADS // 2)


def _head_dim(value: int, config: Any) -> int:
    """The width divided by the heads, if it was so; what is rotated, if only a part of a head is; else another one."""
    if value == getattr(config, "qk_rope_head_dim", None):
        return min(value, SIZES["qk_rope_head_dim"])
    return WIDTH // HEADS * (1 if value * config.num_attention_heads == config.hidden_size else 2)


def _blocks_to_keep(config: Any) -> list[int]:
    """Indices of blocks, in order: at least one of each kind that the lists with an entry per block tell apart."""
    count = config.num_hidden_layers
    lists = [value for value in config.to_dict().values() if isinstance(value, list) and len(value) == count]
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(repr([values[index] for values in lists]), index)
    kept = list(kinds.values())[:BLOCKS]
    others = (index for index in range(count) if index not in kept)
    return sorted([*kept, *(index for index, _ in zip(others, range(BLOCKS - len(kept)), strict=False))])


def _shrink_list(values: list[Any], blocks: int, kept: list[int]) -> list[Any]:
    """A list with an entry per block, or one of indices of blocks; others stay."""
    if len(values) == blocks:
        return [values[index] for index in kept]
    if all(_is_number(value) and 0 <= value < blocks for value in values):
        return [value for value in values if value < len(kept)]
    return values


def _shrink_rotary_factors(given: Any, small: dict[str, Any]) -> None:
    """Rotary scalings with a factor for each frequency have as many as the small heads have."""
    parameters = small.get("rope_parameters")
    if not isinstance(parameters, dict):
        return
    head_dim = getattr(given, "head_dim", None) or given.hidden_size // given.num_attention_heads
    small_head_dim = small.get("head_dim") or WIDTH // HEADS
    small["rope_parameters"] = {
        name: value[: len(value) * small_head_dim // head_dim]
        if name.endswith("_factor") and isinstance(value, list)
        else value
        for name, value in parameters.items()
    }
