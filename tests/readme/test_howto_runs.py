"""The commands of how-tos, as they stand there but for fewer steps, in an empty folder."""

import json
import re
from itertools import pairwise

import pytest

from tests.readme.pages import ROOT, marked, save_files
from tests.warm import run_warm
from thinpipe.cli import main
from thinpipe.core.events import Step, read_events
from thinpipe.data.sources import open_sources

FEW_STEPS = ("--training.steps", "3", "--lr-scheduler.warmup-steps", "1")


def follow(page, name):
    """Runs the commands under a mark."""
    for program, *words in marked(page, name):
        assert program == "thinpipe"
        if words[0] in ("train", "up"):
            train(*words[1:], command=words[0])
        else:
            assert main(words) == 0, words


def train(*words, command="train"):
    """In a program of its own, which may start others."""
    done = run_warm("thinpipe", command, *words, *FEW_STEPS, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


def losses(folder):
    return [event.loss for event in read_events(folder / "events.jsonl") if isinstance(event, Step)]


@pytest.fixture(scope="module")
def pieces():
    """The sample text in forty documents."""
    text = "\n".join(document.text for document in open_sources(["sample:train"]).documents())
    edges = [len(text) * edge // 40 for edge in range(41)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.timeout(900)
def test_on_one_laptop(pieces, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs/howto/laptop.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save_files(page, tmp_path)
    (tmp_path / "books").mkdir()
    for number, piece in enumerate(pieces):
        (tmp_path / f"books/{number}.txt").write_text(piece)
    follow(page, "laptop text")
    follow(page, "laptop train")
    assert "Once upon a time" in capsys.readouterr().out
    follow(page, "laptop processes")
    assert len(losses(tmp_path / "runs/two")) == 3
    again = ["--job.dump-folder", "runs/again", "--parallelism.pipeline-parallel-microbatch-size", "2"]
    train("laptop.toml", *again)
    assert losses(tmp_path / "runs/again") == losses(tmp_path / "runs/two")


def test_text_of_your_own(pieces, tmp_path, monkeypatch):
    page = ROOT / "docs/howto/data.md"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    for number, piece in enumerate(pieces):
        (tmp_path / f"books/{number}.txt").write_text(piece)
    (tmp_path / "letters").mkdir()
    for number, piece in enumerate(pieces[:20]):
        (tmp_path / f"letters/{number}.txt").write_text(piece.upper())
    save_files(page, tmp_path)
    follow(page, "data tokenize")
    follow(page, "data second")
    follow(page, "data mixed")
    assert len(losses(tmp_path / "runs/mixed")) == 3


def test_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    codes = [main(words) for _, *words in marked(ROOT / "docs/howto/plan.md", "plan")]
    assert codes == [0, 0, 0]
    assert (tmp_path / "step.png").stat().st_size > 10_000


def save_small_smollm2(folder, text):
    """A model with the shape of SmolLM2-135M (30 blocks, 9 heads, 3 of keys, tied head), but few numbers."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([text], vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=600,
        hidden_size=36,
        intermediate_size=24,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_fine_tune_with_adapters(pieces, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs/howto/fine-tune.md"
    monkeypatch.chdir(tmp_path)
    save_files(page, tmp_path)
    save_small_smollm2(tmp_path / "smollm2", pieces[0])
    follow(page, "fine-tune lora")
    assert "Once upon a time" in capsys.readouterr().out
    assert len(losses(tmp_path / "runs/lora")) == 3
    adapter = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (adapter["r"], adapter["base_model_name_or_path"]) == (16, str(tmp_path / "smollm2"))
    merged = json.loads((tmp_path / "merged/config.json").read_text())
    assert merged == json.loads((tmp_path / "smollm2/config.json").read_text())
    follow(page, "fine-tune friends")
    assert losses(tmp_path / "runs/lora-friends") == losses(tmp_path / "runs/lora")
    same, own = (
        (tmp_path / folder / "adapter_model.safetensors").read_bytes() for folder in ("adapter-friends", "adapter")
    )
    assert same == own


@pytest.mark.long
@pytest.mark.timeout(900)
def test_into_a_subspace(pieces, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs/howto/fine-tune.md"
    monkeypatch.chdir(tmp_path)
    save_files(page, tmp_path)
    save_small_smollm2(tmp_path / "smollm2", pieces[0])
    [tokenize] = (words for _, *words in marked(page, "fine-tune lora") if words[0] == "tokenize")
    assert main(tokenize) == 0
    follow(page, "fine-tune subspace")
    [after] = re.findall(r"converted to 32 of 36 dimensions: .* -> ([\d.]+) nats", capsys.readouterr().out)
    assert len(losses(tmp_path / "runs/thin")) == 3
    # It began where the import was.
    assert losses(tmp_path / "runs/thin")[0] == pytest.approx(float(after), abs=0.3)
    exported = json.loads((tmp_path / "thin-llama/config.json").read_text())
    assert (exported["num_hidden_layers"], exported["tie_word_embeddings"]) == (30, False)
