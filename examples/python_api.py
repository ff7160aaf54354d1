"""thinpipe as a library: tokens, settings, training, the log, text.

    python examples/python_api.py [FOLDER] [STEPS]

Does what `thinpipe tokenize`, `train`, `eval` and `generate` do. Run it again with more steps and it goes on where it
stopped.
"""

import sys
from pathlib import Path

from thinpipe.checkpoint import find_checkpoint, load_model
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.core.events import Step, Validated, read_events
from thinpipe.data import TokenizeConfig, Tokenizer, has_tokens, no_progress, prepare
from thinpipe.models import SubspaceConfig
from thinpipe.models.generate import generate
from thinpipe.training import (
    DataConfig,
    JobConfig,
    LRSchedulerConfig,
    ModelSettings,
    OptimizerConfig,
    RunConfig,
    Trainer,
    TrainingConfig,
)


def settings(folder: Path, steps: int) -> RunConfig:
    """What a run file says, as frozen dataclasses; `thinpipe.config.toml.load_toml` reads a file into the same."""
    return RunConfig(
        job=JobConfig(dump_folder=folder / "run"),
        data=DataConfig(path=folder / "tokens"),
        model=ModelSettings(preset="llama-tiny", boundaries=(1, 2, 3), subspace=SubspaceConfig(width=16)),
        training=TrainingConfig(steps=steps, global_batch_size=8),
        optimizer=OptimizerConfig(lr=3e-3),
        lr_scheduler=LRSchedulerConfig(warmup_steps=steps // 10),
        boundary=BoundaryConfig(forward="bf16", backward="int8"),
    )


def main(folder: Path, steps: int) -> None:
    if not has_tokens(folder / "tokens/train"):
        text = {"sources": ("sample:train",), "validation_sources": ("sample:validation",)}
        prepare(TokenizeConfig(**text, output=folder / "tokens", vocab_size=2048), no_progress)
    config = settings(folder, steps)
    reason = Trainer(config).train()
    events = list(read_events(config.job.dump_folder / "events.jsonl"))
    steps_done = [event for event in events if isinstance(event, Step)]
    losses = [event.loss for event in events if isinstance(event, Validated)]
    print(f"{reason}: {steps_done[-1].tokens:,} tokens, validation loss {losses[-1]:.3f}")

    model = load_model(find_checkpoint(config.job.dump_folder))
    tokenizer = Tokenizer.load(config.job.dump_folder / "tokenizer")
    prompt = "Alice looked at the Queen"
    ids = [int(token) for token in tokenizer.encode_batch([prompt])[0]]
    answer = generate(model, ids, max_new_tokens=40, temperature=0.8, top_p=0.95)
    print(prompt + tokenizer.decode(list(answer)))


if __name__ == "__main__":
    folder, steps = (*sys.argv[1:], *("runs/python", "200")[len(sys.argv) - 1 :])
    main(Path(folder), int(steps))
