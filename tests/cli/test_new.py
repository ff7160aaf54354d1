"""`thinpipe new`: what it writes is understood, planned and, at its smallest, trained."""

import json
import math
import os
import pty
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.data import chat_tokenizers
from tests.programs import PATIENCE
from thinpipe.config.families import PRESETS
from thinpipe.config.hub import HubConfig
from thinpipe.config.machines import MachinesFile
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import load_toml
from thinpipe.planning.machines import load_machines


def new(folder, *arguments):
    command = [sys.executable, "-m", "thinpipe", "new", *arguments]
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )


FRIENDS = ("--where", "friends", "--machines", "rtx 3060", "Laptop CPU", "RTX 4070")


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny", "llama-1b"])
@pytest.mark.parametrize("where", [("--where", "alone"), FRIENDS, ("--where", "lan", "--machines", "T4", "T4")])
def test_a_new_models_file_is_valid_for_train_and_hub(tmp_path, model, where):
    done = new(tmp_path, "--goal", "pretrain", "--model", model, "--data", "sample:train", *where)
    assert (done.returncode, done.stderr) == (0, "")
    assert "wrote run.toml" in done.stdout
    assert "tokens/s" in done.stdout
    settings = load_toml(tmp_path / "run.toml", RunConfig)
    load_toml(tmp_path / "run.toml", HubConfig)
    model_config = settings.model.resolve(PRESETS[model].vocab_size)
    machines = len(where) - 3 if "--machines" in where else 1
    assert len(model_config.segments) == machines
    assert (model_config.projection.width is not None) == ("friends" in where)
    written = (tmp_path / "run.toml").read_text()
    assert len(written.splitlines()) <= 45
    assert max(map(len, written.splitlines())) <= 120
    if machines > 1:
        assert len(load_machines(tmp_path / "run.machines.toml").machines) == machines


def test_the_next_commands_tokenize_and_host(tmp_path):
    done = new(tmp_path, "--goal", "pretrain", "--model", "llama-tiny", "--data", "books", *FRIENDS)
    *_, tokenize, run = done.stdout.splitlines()
    assert tokenize.strip() == "thinpipe tokenize --sources books --vocab-size 4096 --output tokens"
    assert run.strip() == "thinpipe hub run.toml --hub.peers 3"


def write_base(folder):
    """Only what is read before the weights."""
    folder.mkdir()
    stored = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 7, "hidden_size": 64},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 300},
    }
    (folder / "config.json").write_text(json.dumps(stored))


def write_chats(path, count):
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I. " * 30}]
    path.write_text(f"{json.dumps({'messages': turns})}\n" * count)


def test_a_model_to_tune_is_cut_by_its_own_config(tmp_path):
    write_base(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl", 3)
    done = new(tmp_path, "--goal", "tune", "--model", "base", "--data", "chats.jsonl", *FRIENDS)
    assert (done.returncode, done.stderr) == (0, "")
    settings = load_toml(tmp_path / "run.toml", RunConfig)
    assert (settings.model.hf, settings.model.boundaries) == ("base", (2, 5))
    assert settings.lora is not None
    assert "thinpipe tokenize --sources chats.jsonl --chat --tokenizer base --seq-len 512" in done.stdout


def test_the_length_and_the_steps_follow_from_the_chats(tmp_path):
    write_base(tmp_path / "base")
    chat_tokenizers.make_tokenizer(tmp_path / "base", "chatml")
    write_chats(tmp_path / "chats.jsonl", 120)
    done = new(tmp_path, "--goal", "tune", "--model", "base", "--data", "chats.jsonl", "--where", "alone")
    assert (done.returncode, done.stderr) == (0, "")
    training = load_toml(tmp_path / "run.toml", RunConfig).training
    longest = int(re.search(r"120 chats, the longest of (\d+) tokens", done.stdout)[1])
    assert 0 <= training.seq_len - longest < 32
    assert training.steps == math.ceil(3 * 0.9 * 120 / 8)
    tokenize, train, generate, export = (line.strip() for line in done.stdout.split("next:\n")[1].splitlines())
    assert f"--seq-len {training.seq_len} --validation-fraction 0.1 --output run-tokens" in tokenize
    assert train == "thinpipe train run.toml"
    assert generate == "thinpipe generate runs/run --validation-chats 2"
    assert export == "thinpipe export runs/run run-adapter"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("chat.jsonl", None, "no file"),
        ("odd.jsonl", '{"question": "?", "answer": "!"}\n', "line 1: no chat in the fields"),
    ],
)
def test_chats_that_cannot_be_read_are_refused_before_a_file_is_written(tmp_path, name, text, says):
    write_base(tmp_path / "base")
    chat_tokenizers.make_tokenizer(tmp_path / "base", "chatml")
    if text is not None:
        (tmp_path / name).write_text(text)
    done = new(tmp_path, "--goal", "tune", "--model", "base", "--data", name, "--where", "alone")
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert not (tmp_path / "run.toml").exists()


def test_this_machine_among_friends_is_measured(tmp_path):
    flags = ("--model", "llama-tiny", "--data", "sample:train", "--where", "friends", "--machines", "here", "T4")
    assert new(tmp_path, "--goal", "pretrain", *flags).returncode == 0
    here, card = load_toml(tmp_path / "run.machines.toml", MachinesFile).machine
    assert here.tflops > 0
    assert here.memory.endswith("GB")
    assert (card.device, card.tflops) == ("T4", None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), ("--goal", "--model", "--data", "--where")),
        (("--goal", "pretrain", "--model", "llama-tiny", "--data", "x", "--where", "lan"), ("two machines",)),
        (("--goal", "pretrain", "--model", "lama", "--data", "x", "--where", "alone"), ("llama-tiny",)),
        (
            ("--goal", "pretrain", "--model", "gpt2", "--data", "x", "--where", "lan", "--machines", "RTX 309", "T4"),
            ("RTX 3090",),
        ),
        (
            ("--goal", "pretrain", "--model", "llama-tiny", "--data", "x", "--where", "lan", "--machines", *["T4"] * 5),
            ("4 blocks",),
        ),
        (("--goal", "tune", "--model", "nowhere", "--data", "x", "--where", "alone"), ("nowhere",)),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, arguments, says):
    done = new(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert all(words in done.stderr for words in says)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_kept(tmp_path):
    (tmp_path / "run.toml").write_text("mine")
    flags = ("--goal", "pretrain", "--model", "llama-tiny", "--data", "x", "--where", "alone")
    done = new(tmp_path, *flags)
    assert (done.returncode, (tmp_path / "run.toml").read_text()) == (2, "mine")
    assert "--overwrite" in done.stderr
    assert new(tmp_path, *flags, "--overwrite").returncode == 0


def test_in_a_terminal_five_questions_are_asked(tmp_path):
    """Each is answered as a person would: by a line."""
    answers = ["pretrain", "llama-tiny", "sample:train", "friends", "RTX 3060, T4"]
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "thinpipe", "new", "mine.toml"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen, deadline = "", time.monotonic() + PATIENCE
        for answer in answers:
            while not seen.rstrip().endswith(":") and time.monotonic() < deadline:
                seen += os.read(ours, 4096).decode(errors="replace")
            os.write(ours, f"{answer}\n".encode())
            seen += os.read(ours, 4096).decode(errors="replace") + "\n"
        while process.poll() is None and time.monotonic() < deadline:
            try:
                seen += os.read(ours, 4096).decode(errors="replace")
            except OSError:  # Linux says so when the other side is closed
                break
        assert process.wait(PATIENCE) == 0, seen
    os.close(ours)
    written = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert (written["model"]["preset"], written["model"]["boundaries"]) == ("llama-tiny", [2])
    machines = tomllib.loads((tmp_path / "mine.machines.toml").read_text())["machine"]
    assert [machine["device"] for machine in machines] == ["RTX 3060", "T4"]


def test_what_is_written_trains(tmp_path):
    tokens = tmp_path / "tokens"
    sources = ("--sources", "sample:validation", "--vocab-size", "300", "--output", str(tokens))
    subprocess.run([sys.executable, "-m", "thinpipe", "tokenize", *sources], check=True, timeout=PATIENCE)
    flags = ("--goal", "pretrain", "--model", "llama-tiny", "--data", "tokens", "--where", "alone")
    done = new(tmp_path, *flags)
    assert "tokenize" not in done.stdout
    (command,) = done.stdout.split("next:\n")[1].strip().splitlines()
    words = [*command.split()[1:], "--training.steps", "3", "--lr-scheduler.warmup-steps", "1"]
    words += ["--training.seq-len", "16", "--training.global-batch-size", "2"]
    trained = subprocess.run([sys.executable, "-m", "thinpipe", *words], cwd=tmp_path, timeout=PATIENCE)
    assert trained.returncode == 0
    assert Path(tmp_path, "runs/run/checkpoints").is_dir()
