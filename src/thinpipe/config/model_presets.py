"""Model presets by name. The `tiny` presets train on a laptop's CPU; change any field with `dataclasses.replace`."""

from thinpipe.config.model import GPT2Config, LlamaConfig, ModelConfig, RopeScaling

PRESETS: dict[str, ModelConfig] = {
    "llama-tiny": LlamaConfig(
        vocab_size=4096, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=352, max_seq_len=256
    ),
    "llama-10m": LlamaConfig(
        vocab_size=4096, dim=256, n_layers=8, n_heads=8, n_kv_heads=4, hidden_dim=704, max_seq_len=512
    ),
    "llama-150m": LlamaConfig(
        vocab_size=32_000, dim=768, n_layers=14, n_heads=12, n_kv_heads=12, hidden_dim=2048, max_seq_len=2048
    ),
    "llama-1b": LlamaConfig(
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
    "llama-8b": LlamaConfig(
        vocab_size=128_256,
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14_336,
        max_seq_len=4096,
        rope_scaling=RopeScaling(factor=8.0),
    ),
    "gpt2-tiny": GPT2Config(vocab_size=4096, dim=128, n_layers=4, n_heads=4, max_seq_len=256),
    "gpt2": GPT2Config(vocab_size=50_257, dim=768, n_layers=12, n_heads=12, max_seq_len=1024, tied=True),
}
