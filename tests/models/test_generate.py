"""Generated text: greedy and sampled, with one memory, the same on every run and the same as transformers'."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thinpipe.core.errors import UserError
from thinpipe.models import GPT2Config, LlamaConfig, Model, SubspaceConfig, build, materialise
from thinpipe.models.generate import generate, sample_token
from thinpipe.models.hf.weights import save

LLAMA = LlamaConfig(
    vocab_size=61, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=40, init_std=0.3
)
GPT2 = GPT2Config(vocab_size=61, dim=32, n_layers=3, n_heads=4, max_seq_len=40, init_std=0.3)
CUT = {"boundaries": (1, 2), "subspace": SubspaceConfig(width=6, fixed_std=0.3)}
CONFIGS = {"llama": LLAMA, "gpt2": GPT2, "llama-cut": replace(LLAMA, **CUT), "gpt2-cut": replace(GPT2, **CUT)}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def model_of(name: str) -> Model:
    return materialise(build(CONFIGS[name]), seed=3).eval()


def text(model: Model, **settings: Any) -> list[int]:
    return list(generate(model, PROMPT, **{"max_new_tokens": 20, **settings}))


@torch.no_grad()
def greedy_by_full_forwards(model: Model, tokens: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.5, "top_p": 1e-9}])
def test_greedy_and_a_tiny_nucleus_take_the_likeliest_token(name: str, settings: dict[str, float]) -> None:
    model = model_of(name)
    expected = greedy_by_full_forwards(model, 20)
    assert len(set(expected)) > 5  # a text that repeats one token would prove little
    assert text(model, **settings) == expected


@pytest.mark.parametrize("piece", [1, 3])
def test_a_long_prompt_is_read_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt2-cut")
    expected = text(model, temperature=0.0)
    monkeypatch.setattr("thinpipe.models.generate._PREFILL_CHUNK", piece)
    assert text(model, temperature=0.0) == expected


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_is_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_of(name)
    save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([PROMPT])
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0, use_cache=True
    )
    assert text(model, temperature=0.0) == out[0, len(PROMPT) :].tolist()


def test_the_seed_and_nothing_else_decides_a_sample() -> None:
    model = model_of("llama-cut")
    first = text(model, seed=7, top_p=0.9)
    torch.rand(3)  # the global random state is not used
    assert text(model, seed=7, top_p=0.9) == first
    assert len({tuple(text(model, seed=seed, top_p=0.9)) for seed in range(5)}) == 5


def counts(logits: list[float], temperature: float, top_p: float, draws: int = 4_000) -> list[float]:
    """How often each id was chosen, as a share."""
    generator = torch.Generator().manual_seed(0)
    counted = Counter(sample_token(torch.tensor(logits), temperature, top_p, generator) for _ in range(draws))
    return [counted[token] / draws for token in range(len(logits))]


PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15], dtype=torch.float64)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1.0, [0, 1, 2, 3, 4]),
        (0.96, [0, 1, 2, 3, 4]),
        (0.9, [1, 2, 3, 4]),
        (0.71, [1, 3, 4]),
        (0.5, [1, 3]),
        (0.3, [1]),
    ],
)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_nucleus_has_its_tokens_and_their_probabilities(top_p: float, kept: list[int], temperature: float) -> None:
    # The logits that have these probabilities at this temperature.
    logits = (PROBABILITIES.log() * temperature).tolist()
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    shares = torch.tensor(counts(logits, temperature, top_p), dtype=torch.float64)
    assert shares.nonzero().flatten().tolist() == kept
    assert float((shares - expected).abs().max()) < 4 * (0.25 / 4_000) ** 0.5  # four standard errors


def test_a_text_ends_after_the_stop_token_and_when_there_is_no_more_room() -> None:
    model = model_of("gpt2")
    whole = text(model, temperature=0.0, max_new_tokens=1000)
    assert len(PROMPT) + len(whole) == 40
    stop_id = whole[6]
    assert text(model, temperature=0.0, stop_id=stop_id) == whole[: whole.index(stop_id) + 1]
    assert text(model, max_new_tokens=0) == []


def test_each_token_is_yielded_before_the_next_is_computed() -> None:
    model = model_of("llama")
    lengths: list[int] = []
    model.first.register_forward_pre_hook(lambda _, arguments: lengths.append(arguments[0].shape[1]))
    stream = generate(model, PROMPT, max_new_tokens=5)
    for expected in ([8], [8, 1], [8, 1, 1]):
        next(stream)
        assert lengths == expected
    assert torch.is_grad_enabled()  # between two tokens the caller's settings hold


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "a prompt of 0 tokens: give at least one"),
        ([1] * 40, {}, "a prompt of 40 tokens: give at least one, and fewer than max_seq_len 40"),
        ([61], {}, "between 0 and 60: is it this model's tokenizer"),
        ([1], {"temperature": -1.0}, "temperature -1.0 must be 0 or more"),
        ([1], {"top_p": 0.0}, "top_p 0.0 above 0"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens -1"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(prompt: list[int], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(model_of("llama"), prompt, **{"max_new_tokens": 3, **settings})


def test_dropout_and_broken_logits_are_refused() -> None:
    model = materialise(build(replace(GPT2, dropout=0.1)), seed=1)
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        generate(model, PROMPT, max_new_tokens=1)
    for broken in (torch.nan, torch.inf):
        with pytest.raises(UserError, match="logits are not finite"):
            sample_token(torch.tensor([0.0, broken]), 0.0, 1.0, torch.Generator())
