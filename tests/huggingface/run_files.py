"""A small Hugging Face model with a tokenizer, tokens made with it, and runs that train on it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.huggingface.models import default_config, save_model
from tests.programs import PATIENCE
from thinpipe.config.data import TokenizeConfig
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.run import (
    CheckpointConfig,
    DataConfig,
    JobConfig,
    LRSchedulerConfig,
    ModelSettings,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)
from thinpipe.config.toml import dump_toml
from thinpipe.data import Tokenizer, prepare
from thinpipe.models.hf.shrink import shrink

STEPS = 4
CUTS = (2, 4, 6)
LORA = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1)
WAYS = {
    "full": {},
    "LoRA": {"lora": LORA},
    "nf4": {"lora": LORA, "quantize_base": "nf4"},
    "int8": {"lora": LORA, "quantize_base": "int8"},
}
"""Name -> what is trained: sections and settings of the model."""


def words(count, start=0):
    return [f"{n} bottles of beer on the wall, {n} bottles of beer. " * 3 for n in range(start, start + count)]


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.train(words(50), vocab_size=300)


@pytest.fixture(scope="session")
def tune_tokens(tmp_path_factory, tokenizer) -> Path:
    """Tokens made with the tokenizer, as `thinpipe tokenize --tokenizer` makes them."""
    folder = tmp_path_factory.mktemp("tune")
    tokenizer.save(folder / "own")
    for name, texts in (("train", words(80)), ("validation", words(40, 100))):
        (folder / f"{name}.txt").write_text("\n".join(texts))
    prepare(
        TokenizeConfig(
            sources=(str(folder / "train.txt"),),
            validation_sources=(str(folder / "validation.txt"),),
            output=folder / "tokens",
            tokenizer=folder / "own",
        )
    )
    return folder / "tokens"


@pytest.fixture(scope="session")
def base_of(tmp_path_factory, tokenizer):
    """A base of a model type, with its tokenizer; dropout as in the published config.json."""
    made = {}

    def make(model_type, **changes):
        key = (model_type, *changes.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp(model_type) / "base"
            save_model({**shrink(default_config(model_type)), **changes}, made[key])
            tokenizer.save(made[key])
        return made[key]

    return make


def run_of(base, tokens, folder, way="LoRA", *, degree=1, cuts=CUTS, **sections) -> RunConfig:
    """Settings of a run of a few steps."""
    settings = dict(WAYS[way])
    model = ModelSettings(hf=str(base), boundaries=cuts or None, quantize_base=settings.pop("quantize_base", None))
    config = RunConfig(
        job=JobConfig(dump_folder=folder),
        model=model,
        data=DataConfig(path=tokens),
        training=TrainingConfig(steps=STEPS, global_batch_size=8, seq_len=16, device="cpu", precision="fp32"),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=degree, pipeline_parallel_microbatch_size=2, timeout_seconds=PATIENCE
        ),
        lr_scheduler=LRSchedulerConfig(warmup_steps=1),
        checkpoint=CheckpointConfig(interval=2, keep_latest_k=0),
        validation=ValidationConfig(freq=2, steps=1),
        **settings,
    )
    return replace(config, **sections)


def train_in_processes(programs, config, environment=None):
    """`thinpipe train`, in as many processes as the settings say."""
    file = config.job.dump_folder.with_suffix(".toml")
    file.write_text(dump_toml(config))
    program = programs(f"train-{config.job.dump_folder.name}", "train", file, environment=environment)
    assert program.finish() == 0, program.printed
