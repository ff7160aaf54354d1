"""Golden runs of `thinpipe train` and of what comes after it: quick start, keel, subspace, GPT-2, links, plans."""

import hashlib
import json
from pathlib import Path

from tests.golden.commands import run_commands
from tests.golden.data import write_tokens
from tests.golden.environment import ROOT
from tests.golden.observe import exact, exported_tensors, figures_of, observe_run
from thinpipe.data import Tokens

EXAMPLES = ROOT / "examples"
PROMPT = "Alice looked at the Queen"

TOKENIZE = [
    *("tokenize", "--sources", "sample:train", "--validation-sources", "sample:validation"),
    *("--vocab-size", "2048", "--output", "tokens"),
]
QUICK_START = [
    *("train", str(EXAMPLES / "quickstart.toml"), "--training.steps", "4", "--training.global-batch-size", "4"),
    *("--lr-scheduler.warmup-steps", "2", "--validation.freq", "2", "--validation.steps", "1"),
]
KEEL = [
    *("train", "preset:default", "--job.dump-folder", "runs/keel", "--parallelism.pipeline-parallel-degree", "1"),
    *(
        "--parallelism.pipeline-parallel-microbatch-size",
        "2",
        "--training.steps",
        "3",
        "--lr-scheduler.warmup-steps",
        "1",
    ),
    *("--training.global-batch-size", "4", "--training.seq-len", "48", "--validation.steps", "1"),
    *("--model.dim", "64", "--model.n-layers", "4", "--model.n-heads", "4", "--model.n-kv-heads", "2"),
    *("--model.hidden-dim", "176", "--model.boundaries", "1", "2", "3"),
    *("--model.projection.token-prior-rank", "16", "--model.projection.embedding-rank", "16"),
]
LINKS = [
    *("train", str(EXAMPLES / "links.toml"), "--parallelism.pipeline-parallel-degree", "2", "--data.path", "tokens"),
    *("--training.steps", "3", "--lr-scheduler.warmup-steps", "1", "--training.global-batch-size", "8"),
    *("--training.seq-len", "32", "--parallelism.pipeline-parallel-microbatch-size", "2"),
    *("--parallelism.pipeline-parallel-extra-microbatches", "1"),
]
SMALL = """
[data]
path = "synthetic"
[training]
steps = 12
global_batch_size = 4
seq_len = 16
[parallelism]
pipeline_parallel_microbatch_size = 2
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 3
[basis]
interval = 5
[validation]
freq = 6
steps = 2
"""
SUBSPACE = """
[job]
dump_folder = "runs/subspace"
[model]
preset = "llama-tiny"
dim = 32
n_heads = 2
n_kv_heads = 1
hidden_dim = 64
max_seq_len = 32
boundaries = [1, 3]
[model.subspace]
width = 4
"""
GPT2 = """
[job]
dump_folder = "runs/gpt2"
[model]
preset = "gpt2-tiny"
dim = 32
n_layers = 2
n_heads = 2
max_seq_len = 32
dropout = 0.1
boundaries = [1]
[model.subspace]
width = 4
fixed = "gaussian"
free_last = false
"""
PLANS = {
    "plan of the keel": ["friends-1b.toml", "machines.toml"],
    "plan of the keel, searched": ["friends-1b.toml", "machines.toml", "--search"],
    "plan of the keel on rented machines": ["friends-1b.toml", "cloud.toml", "--tokens", "1B"],
    "plan of the subspace": ["friends.toml", "machines.toml", "--hub.use-all-peers", "--vocab-size", "2048"],
    "plan of a dense model": [
        *("friends.toml", "machines.toml", "--model.subspace.width", "None"),
        *("--boundary.backward", "bf16", "--hub.use-all-peers", "--vocab-size", "2048"),
    ],
    "plan of the paper": ["preset:paper", "cloud.toml", "--vocab-size", "32000", "--model.preset", "llama-150m"],
}


def one_process(folder: Path) -> dict[str, dict]:
    """Runs in one process, which is the ground truth, and what is made of them: an evaluation, a text, exports."""
    write_tokens(folder / "synthetic", train=4000, validation=1000)
    for name, settings in (("subspace", SUBSPACE), ("gpt2", GPT2)):
        (folder / f"{name}.toml").write_text(settings + SMALL)
    printed = run_commands(
        folder,
        TOKENIZE,
        QUICK_START,
        ["eval", "runs/quickstart", "--max-batches", "2", "--batch-size", "4"],
        ["generate", "runs/quickstart", "--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "12"],
        ["generate", "runs/quickstart", "--prompt", PROMPT, "--seed", "1", "--max-new-tokens", "12"],
        ["export", "runs/quickstart", "exported"],
        KEEL,
        ["export", "runs/keel", "exported-keel"],
        ["train", "subspace.toml"],
        ["train", "gpt2.toml"],
        ["export", "runs/gpt2", "exported-gpt2"],
    )
    quick_start = {
        "tokens": [tokens_sha256(folder / "tokens" / side) for side in ("train", "validation")],
        **observe_run(folder / "runs/quickstart"),
        "evaluation": [exact(json.loads(printed[2].splitlines()[-1])["loss"])],
        "generated": printed[3:5],
        "exported": exported_tensors(folder / "exported"),
    }
    return {
        "quick start": quick_start,
        "keel": {**observe_run(folder / "runs/keel"), "exported": exported_tensors(folder / "exported-keel")},
        "subspace": observe_run(folder / "runs/subspace"),
        "gpt2": {**observe_run(folder / "runs/gpt2"), "exported": exported_tensors(folder / "exported-gpt2")},
    }


def tokens_sha256(folder: Path) -> str:
    tokens = Tokens(folder)
    return hashlib.sha256(tokens.read(0, len(tokens)).astype("<i8").tobytes()).hexdigest()


def links(folder: Path) -> dict[str, dict]:
    """Two processes of `thinpipe train`, each behind an emulated line."""
    write_tokens(folder / "tokens", train=4000, validation=1000)
    run_commands(folder, LINKS)
    return {"links": observe_run(folder / "runs/thin")}


def run_file(name: str) -> str:
    return name if name.startswith("preset:") else str(EXAMPLES / name)


def plans(folder: Path) -> dict[str, dict]:
    """Every number of plans for machines of the examples."""
    commands = [
        ["plan", run_file(run), "--machines", str(EXAMPLES / machines), *more, "--json"]
        for run, machines, *more in PLANS.values()
    ]
    printed = run_commands(folder, *commands)
    return {name: {"figures": figures_of(text)} for name, text in zip(PLANS, printed, strict=True)}
