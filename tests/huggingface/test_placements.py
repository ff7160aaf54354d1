"""`thinpipe train` on a Hugging Face model: every placement, every way to train and every architecture equals the twin,
with dropout, in every loss, norm and saved tensor."""

import pytest

from tests.huggingface.run_files import STEPS, WAYS, run_of, train_in_processes
from tests.programs import events_of, files_of
from thinpipe.checkpoint import find_checkpoint
from thinpipe.core.events import Step, Validated
from thinpipe.core.state_folder import STATE_FOLDER_VARIABLE
from thinpipe.training.trainer import Trainer

ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "phi3", "mistral", "smollm3")
DEFAULT = (("qwen3", "LoRA", 2),)
"""The others repeat them at length."""


def outcome(config):
    steps = [(event.step, event.loss, event.grad_norm) for event in events_of(config, Step)]
    validations = [(event.step, event.loss) for event in events_of(config, Validated)]
    assert (len(steps), len(validations)) == (STEPS, 2)
    base = find_checkpoint(config.job.dump_folder).manifest.model["base_sha256"]
    assert len(base) == 64
    return steps, validations, files_of(config, STEPS), base


def combinations():
    for model_type in ARCHITECTURES:
        for way in WAYS:
            for degree in (2, 4):
                values = model_type, way, degree
                marks = [] if values in DEFAULT else [pytest.mark.long]
                yield pytest.param(*values, marks=marks, id="-".join(map(str, values)))


@pytest.mark.parametrize(("model_type", "way", "degree"), list(combinations()))
def test_processes_equal_the_twin(model_type, way, degree, base_of, tune_tokens, tmp_path, programs):
    base = base_of(model_type)
    twin, cell = (
        run_of(base, tune_tokens, tmp_path / name, way, degree=count) for name, count in (("twin", 1), ("cell", degree))
    )
    Trainer(twin).train()
    train_in_processes(programs, cell)
    assert outcome(cell) == outcome(twin)


def test_every_process_probes_a_model_of_which_this_machine_knows_nothing(base_of, tune_tokens, tmp_path, programs):
    config = run_of(base_of("qwen3"), tune_tokens, tmp_path / "run", degree=2)
    train_in_processes(programs, config, {STATE_FOLDER_VARIABLE: str(tmp_path / "state")})
    assert len([*(tmp_path / "state" / "probes").iterdir()]) == 1


def test_ways_differ(base_of, tune_tokens, tmp_path):
    """Equality is not for want of a difference between the ways."""
    losses = []
    for way in WAYS:
        config = run_of(base_of("qwen3"), tune_tokens, tmp_path / way, way)
        Trainer(config).train()
        losses.append(outcome(config)[0][-1])
    assert len(set(losses)) == len(WAYS)
