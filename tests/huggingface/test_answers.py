"""Answers to held-out chats before and after training: the tokens of transformers' own generate, side by side."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from tests.data.chat_tokenizers import make_tokenizer
from tests.huggingface.models import default_config, save_model
from tests.huggingface.run_files import LORA, run_of, words
from tests.huggingface.test_export import exported
from thinpipe.checkpoint import find_checkpoint, load_base, load_model
from thinpipe.cli import main
from thinpipe.cli.compare_answers import answers
from thinpipe.config.commands import GenerateConfig
from thinpipe.config.run import DataConfig
from thinpipe.core.errors import DataError
from thinpipe.data import Tokenizer, Tokens, held_out_chats
from thinpipe.models.hf.shrink import shrink
from thinpipe.training.trainer import Trainer

NEW = 12


def chat(number):
    turns = [("user", f"{number} bottles?"), ("assistant", "Yes."), ("user", "More?"), ("assistant", f"{number + 1}.")]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers") / "base"
    save_model(shrink(default_config("qwen3", tie_word_embeddings=False)), folder)
    return make_tokenizer(folder, "chatml")


@pytest.fixture(scope="module")
def chats(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("chats")
    for name, numbers in (("train", range(40)), ("validation", range(50, 57))):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(chat(number)) for number in numbers))
    arguments = ["--sources", str(folder / "train.jsonl"), "--validation-sources", str(folder / "validation.jsonl")]
    assert main(["tokenize", "--chat", "--tokenizer", str(base), *arguments, "--output", str(folder / "tokens")]) == 0
    return folder / "tokens"


@pytest.fixture(scope="module", params=["LoRA", "full"])
def tuned(request, tmp_path_factory, base, chats):
    folder = tmp_path_factory.mktemp(request.param) / "run"
    config = run_of(base, chats, folder, request.param, data=DataConfig(path=chats))
    longest = Tokens(chats / "train").manifest.chat.longest_chat
    config = replace(
        config,
        training=replace(config.training, seq_len=longest - 1),
        optimizer=replace(config.optimizer, lr=3e-2 if request.param == "LoRA" else 1e-2),
        lora=None if config.lora is None else replace(LORA, lora_alpha=64),
    )
    Trainer(config).train()
    return config


def theirs(folder, prompt, ends):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0
    )
    return found[0, len(prompt) :].tolist()


def test_they_are_the_tokens_of_transformers_own_generate(tuned, base, chats, tmp_path):
    held_out = held_out_chats(Tokens(chats / "validation"), 3)
    tokenizer = Tokenizer.load(base)
    greedy = GenerateConfig(run=tuned.job.dump_folder, temperature=0, max_new_tokens=NEW)
    checkpoint = find_checkpoint(tuned.job.dump_folder)
    before, after = (answers(load(checkpoint), held_out, tokenizer, greedy) for load in (load_base, load_model))
    flags = [] if tuned.lora is None else ["--merge"]
    folder = exported(tuned, tmp_path / "whole", *flags)
    ends = [tokenizer.vocabulary.end_of_text_id, held_out[0].answer[-1]]
    assert before == [theirs(base, each.prompt, ends) for each in held_out]
    assert after == [theirs(folder, each.prompt, ends) for each in held_out]
    assert before != after


def test_the_command_prints_question_and_three_answers(tuned, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    command = ["generate", str(tuned.job.dump_folder), "--validation-chats", "2", "--max-new-tokens", "5"]
    assert main([*command, "--temperature", "0"]) == 0
    said = capsys.readouterr().out
    assert "chat 2 of 2:\n<|im_start|>user\n56 bottles?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n" in said
    assert said.count("in the data") == 2
    assert "51.<|im_end|>" in said
    assert "57.<|im_end|>" in said


def test_a_held_out_chat_is_what_came_before_the_last_answer(base, chats):
    tokenizer = Tokenizer.load(base)
    found = held_out_chats(Tokens(chats / "validation"), 100)
    assert len(found) == 7
    assert [tokenizer.decode(each.answer) for each in found] == [f"{number}.<|im_end|>" for number in range(51, 58)]
    assert all(tokenizer.decode(each.prompt).endswith("More?<|im_end|>\n<|im_start|>assistant\n") for each in found)
    assert found[0].answer[-1] in tokenizer.special_ids


def test_text_and_chats_without_a_beginning_of_the_answer_are_refused(base, tune_tokens, tmp_path):
    with pytest.raises(DataError, match="--chat"):
        held_out_chats(Tokens(tune_tokens / "validation"), 1)
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in words(9)))
    command = ["tokenize", "--chat", "--train-on", "all", "--tokenizer", str(base), "--validation-fraction", "0.5"]
    assert main([*command, "--sources", str(tmp_path / "texts.jsonl"), "--output", str(tmp_path / "all")]) == 0
    with pytest.raises(DataError, match="--train-on all"):
        held_out_chats(Tokens(tmp_path / "all" / "validation"), 1)
