"""The verbs together, as a person would chain them, through real processes and small files."""

import json
import re
from pathlib import Path

import pytest

from tests.reference.exported import assert_same_in_transformers
from tests.warm import run_warm

SETTINGS = """
[job]
dump_folder = "run"
[data]
path = "tokens"
[model]
preset = "{preset}"
dim = 64
n_layers = 3
n_heads = 2
boundaries = [1, 2]
[model.subspace]
width = 8
[training]
steps = 6
global_batch_size = 4
seq_len = 32
[lr_scheduler]
warmup_steps = 2
[basis]
interval = 3
[validation]
freq = 6
steps = 2
"""


def thinpipe(*arguments, cwd, code=0):
    done = run_warm("thinpipe", *arguments, cwd=cwd, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module", params=["llama-tiny", pytest.param("gpt2-tiny", marks=pytest.mark.long)])
def trained(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    validation = ("--validation-sources", "sample:validation")
    thinpipe(
        "tokenize", "--sources", "sample:train", *validation, "--vocab-size", "300", "--output", "tokens", cwd=folder
    )
    (folder / "run.toml").write_text(SETTINGS.format(preset=request.param))
    thinpipe("train", "run.toml", cwd=folder)
    return folder


def test_eval_agrees_with_the_validation_of_the_run(trained):
    result = json.loads(
        thinpipe("eval", "run", "--batch-size", "4", "--max-batches", "2", cwd=trained).splitlines()[-1]
    )
    events = [json.loads(line) for line in (trained / "run/events.jsonl").read_text().splitlines()]
    (validated,) = [event for event in events if event["event"] == "validated"]
    assert result["loss"] == pytest.approx(validated["loss"], rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(validated["bits_per_byte"], rel=1e-6)
    assert result["step"] == 6


def test_generate_continues_the_prompt_and_repeats_with_the_seed(trained):
    ask = ("generate", "run", "--prompt", "The Queen", "--max-new-tokens", "12")
    first, again, other = (thinpipe(*ask, *seed, cwd=trained) for seed in ((), (), ("--seed", "1")))
    assert first.startswith("The Queen")
    assert first == again != other


def test_an_export_has_the_same_logits_and_text(trained):
    thinpipe("export", "run", "exported", cwd=trained)
    assert_same_in_transformers(trained / "exported", trained / "run", "The Queen of Hearts")


def test_import_to_a_subspace_needs_data_and_reports_its_cost(trained):
    if not (trained / "exported").exists():
        thinpipe("export", "run", "exported", cwd=trained)
    cast = ("import", "exported", "cast", "--subspace-width", "8", "--boundaries", "1", "2")
    assert "--data" in thinpipe(*cast, cwd=trained, code=2)
    assert "pass --boundaries" in thinpipe(*cast[:5], "--data", "tokens", cwd=trained, code=2)
    printed = thinpipe(*cast, "--data", "tokens", cwd=trained)
    # It was trained in eight dimensions, so a cast into eight finds them again.
    assert "100.0% of their squared norm" in printed
    before, after = printed.split("loss ")[1].split(" nats")[0].split(" -> ")
    assert float(before) == pytest.approx(float(after), abs=2e-4)
    (trained / "on.toml").write_text('[job]\ndump_folder = "on"\n[data]\npath = "tokens"\n[model]\ninitial = "cast"\n')
    flags = ("--training.steps", "2", "--training.seq-len", "32", "--lr-scheduler.warmup-steps", "1")
    printed = thinpipe("train", "on.toml", *flags, cwd=trained)
    assert float(printed.split("loss: ")[1].split()[0]) == pytest.approx(float(before), abs=0.5)  # not from random


def test_settings_are_printed_and_flags_beat_the_file(trained):
    flags = ("--job.print-config", "--job.dump-folder", "other", "--training.steps", "3", "--optimizer.lr", "0.5")
    printed = thinpipe("train", "run.toml", *flags, cwd=trained)
    assert "lr = 0.5" in printed
    assert "steps = 3" in printed
    assert "steps = 3" in (trained / "other/run.toml").read_text()


def test_help_with_a_file_shows_its_values(trained):
    assert re.search(r"--training.steps .* \[6\]\n", thinpipe("train", "run.toml", "--help", cwd=trained))
    assert "(default: 6)" in thinpipe("train", "run.toml", "--help-all", cwd=trained)
    assert re.search(r"--training.steps .* \[1000\]\n", thinpipe("train", "--help", cwd=trained))
    assert "thinpipe train RUN.toml" in thinpipe("train", "--help", cwd=trained)


def test_a_typo_in_the_file_and_in_a_flag_name_the_nearest(trained):
    (trained / "typo.toml").write_text("[training]\nstesp = 3\n")
    message = thinpipe("train", "typo.toml", cwd=trained, code=2)
    assert message == "thinpipe: typo.toml: unknown key training.stesp: did you mean training.steps?\n"
    assert "--training.steps" in thinpipe("train", "run.toml", "--training.stesp", "3", cwd=trained, code=2)
    assert "needs a settings file" in thinpipe("train", cwd=trained, code=2)
    assert "no file missing.toml" in thinpipe("train", "missing.toml", cwd=trained, code=2)


def test_report_draws_and_tells(trained):
    printed = thinpipe("report", "run", "--output", "page", "--sample", "The cat", cwd=trained)
    assert "6 steps" in printed
    assert printed.splitlines()[-1] == "page/report.html"
    assert (trained / "page/loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<b>The cat</b>" in (trained / "page/report.html").read_text()
    assert "**The cat**" in (trained / "page/report.md").read_text()
    assert "there is no folder nowhere" in thinpipe("eval", "nowhere", cwd=trained, code=2)
    assert "did you mean run?" in thinpipe("generate", "runn", cwd=trained, code=2)
    assert "exported is not empty" in thinpipe("export", "run", "exported", cwd=trained, code=2)
    said = thinpipe("export", "run", "exported", "--overwrite", cwd=trained)
    assert "were trained; the export multiplies the subspace's factors out" in said
