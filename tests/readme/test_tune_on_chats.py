"""docs/howto/fine-tune.md from a file of chats to an adapter that answers differently: three peers tune a small model,
and peft opens what they made."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.chat_tokenizers import make_tokenizer
from tests.readme.pages import ROOT, blocks, marked, save_files
from tests.warm import run_warm
from thinpipe.cli import main

PAGE = ROOT / "docs/howto/fine-tune.md"
FASTER = (
    *("--training.steps", "40", "--lr-scheduler.warmup-steps", "5", "--optimizer.lr", "1e-2"),
    *("--model.boundaries", "2", "4"),
)
"""Beside the flags of the page: six blocks learn one answer in a minute."""
TAUGHT = "Flamingo"


def question(number):
    return [{"role": "user", "content": f"What is guest {number} to play croquet with?"}]


def save_small_instruct(folder):
    """A model like SmolLM2-135M-Instruct (grouped queries, tied head), but with six blocks and few, random numbers."""
    make_tokenizer(folder, "chatml")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=36,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.timeout(1500)
def test_friends_teach_an_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    save_files(PAGE, tmp_path)
    save_small_instruct(tmp_path / "smollm2-instruct")
    chats = [{"messages": [*question(number), {"role": "assistant", "content": TAUGHT}]} for number in range(60)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    for _, *words in marked(PAGE, "fine-tune chats"):
        if words[0] == "up":
            done = run_warm("thinpipe", *words, *FASTER, timeout=1200)
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            capsys.readouterr()
            assert main(words) == 0, words
        if words[0] == "generate":
            said = capsys.readouterr().out
            assert said.count(f"{TAUGHT}<|im_end|>") == 4, "of two chats the tuned answer and the one in the data"

    [opening] = (block.text for block in blocks(PAGE) if block.language == "python")
    names: dict[str, object] = {}
    exec(opening, names)
    chat = names["tokenizer"].apply_chat_template(question(1000), add_generation_prompt=True, return_tensors="pt")
    ids = chat["input_ids"]
    end = names["tokenizer"].convert_tokens_to_ids("<|im_end|>")

    def answer():
        made = names["tuned"].generate(input_ids=ids, do_sample=False, max_new_tokens=12, eos_token_id=end)
        return names["tokenizer"].decode(made[0, ids.shape[1] :])

    assert answer() == f"{TAUGHT}<|im_end|>"
    with names["tuned"].disable_adapter():
        assert TAUGHT not in answer()
