"""Public entries that compute on a device, generated from what a run can choose (`tests/device/choices.py`).

Every entry is a function of a device and an empty folder, and returns what it computed. `tests/device/test_entries.py`
compares `sim` with the CPU. `python -m tests.device.entries` prints the list.
"""

import contextlib
import hashlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import thinpipe
from tests.device.choices import (
    MODELS,
    TABLES,
    WIDTH,
    boundaries,
    boundary_of,
    codecs,
    compressions,
    model_settings,
    trainings,
)
from tests.reference.language import SyntheticLanguage
from thinpipe.boundary.formats import FORMATS
from thinpipe.checkpoint import CheckpointFolder, new_manifest
from thinpipe.cli import main
from thinpipe.config.families import FAMILIES
from thinpipe.config.model import ExecutionConfig, SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
    CheckpointConfig,
    DataConfig,
    JobConfig,
    LRSchedulerConfig,
    OptimizerConfig,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import BasisChanged, Step, Validated, read_events
from thinpipe.models import build, materialise
from thinpipe.models.generate import generate
from thinpipe.models.hf import projection as projection_export
from thinpipe.models.hf import weights
from thinpipe.models.to_dense import to_dense
from thinpipe.models.to_subspace import to_subspace
from thinpipe.training.engine import Engine
from thinpipe.training.mean_loss import mean_loss

VOCABULARY, TOKENS, STEPS = 64, 12, 3
LANGUAGE = SyntheticLanguage(VOCABULARY, seed=1)


@dataclass(frozen=True)
class Entry:
    kind: str
    name: str
    run: Callable[[str, Path], object]
    """From a device and an empty folder to what was computed: numbers, text and digests."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def run_settings(model, **sections):
    return RunConfig(
        model=model,
        training=TrainingConfig(steps=STEPS, global_batch_size=4, seq_len=TOKENS),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=2),
        lr_scheduler=LRSchedulerConfig(warmup_steps=1),
        basis=BasisConfig(interval=2),
        **sections,
    )


def digest(tensor):
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]


def digests(module):
    """Of all parameters and buffers, which are on one device."""
    assert len({tensor.device for tensor in (*module.parameters(), *module.buffers())}) == 1
    return {name: digest(tensor) for name, tensor in module.state_dict().items()}


def file_digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(folder.iterdir())}


def ids_of(step):
    return LANGUAGE.batch(step % 2, 4, TOKENS).numpy()


def trained(config, device, folder):
    """Steps, a checkpoint in their middle that another engine goes on from, a change of basis, validation."""
    config = replace(config, training=replace(config.training, device=device))
    model, seen = config.model.resolve(VOCABULARY), []
    engine = Engine(config, model)
    for step in range(STEPS):
        if step == 1:
            manifest = new_manifest(engine.model, step=step)
            saved = CheckpointFolder(folder).save(manifest, engine.state(with_space=True))
            engine = Engine(config, model)
            engine.restore(saved)
        outcome = engine.step(step, ids_of(step), lr=3e-3)
        assert outcome.fault is None
        seen.append((outcome.loss, outcome.grad_norm))
        if engine.basis_is_due(step + 1):
            seen.append(repr(engine.update_basis(ids_of(step))))
    assert {parameter.device.type for parameter in engine.parameters.values()} == {device}
    layers = engine.state(with_space=True).items()
    state = {f"{layer}/{name}": digest(tensor) for layer, tensors in layers for name, tensor in tensors.items()}
    return [seen, engine.evaluate([ids_of(1)]), state]


def coded(name, settings, device, _folder):
    """Messages of a codec, and what they are decoded to by another one."""
    found = []
    for stochastic in (False, True):
        ends = [thinpipe.codec(name, (2, 5, 16), stochastic=stochastic, **settings) for _ in range(2)]
        for number in range(2):
            values = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(number)).to(device)
            message = ends[0].encode(values)
            decoded = ends[1].decode(message)
            assert message.device == decoded.device == values.device
            found += [digest(message), digest(decoded)]
    return found


def squared_error(output, target):
    return (output - target).square().mean()


def sequential(boundary, device, _folder):
    """Modules of somebody else with compressed boundaries: steps, codec state, outputs."""
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(device) for _ in range(3)]
    twin = thinpipe.CompressedSequential(modules, shape=(2, 5, 16), boundary=boundary, seed=5)
    losses = []
    for _ in range(2):
        inputs, target = torch.randn(2, 4, 5, 16).to(device)
        losses += twin.step(inputs, target=target, loss_fn=squared_error, n_microbatches=2)
        twin.load_codec_state(twin.codec_state())
    with torch.no_grad():
        output = twin(inputs[:2])
    assert output.device.type == losses[0].device.type == device
    found = [output, *losses, *(parameter.grad for parameter in twin.parameters()), *twin.codec_state().values()]
    return [digest(tensor) for tensor in found]


@torch.no_grad()
def model_of(config, device):
    """With random numbers in biases and norms too, so that every tensor shows in the results."""
    model = materialise(build(config), seed=1, device=device).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(device))
    return model


def used(family, name, device, folder):
    """Evaluating, generating, and a Hugging Face folder of a model with projections."""
    model = model_of(model_settings(family, name).resolve(VOCABULARY), device)
    prompt, how = [1, 2, 3], {"max_new_tokens": 6, "top_p": 0.9}
    texts = [list(generate(model, prompt, temperature=heat, seed=1, **how)) for heat in (0.0, 0.8)]
    exported = {}
    if model.config.has_projection and family == "llama":  # other families refuse it
        projection_export.save(model, folder / "exported")
        exported = file_digests(folder / "exported")
    return [mean_loss(model, [ids_of(0)], torch.device(device)), texts, exported]


def converted(family, fixed, free_last, device, folder):
    """To dense, to a Hugging Face folder, from it, and to a subspace again."""
    subspace = SubspaceConfig(width=WIDTH, fixed=fixed, free_last=free_last)
    dense = to_dense(model_of(replace(model_settings(family), subspace=subspace).resolve(VOCABULARY), device))
    weights.save(dense, folder / "exported")
    loaded = materialise(build(weights.load_config(folder / "exported")), seed=0, device=device, draw=False).eval()
    weights.load_weights(loaded, folder / "exported")
    assert digests(loaded) == digests(dense)
    again, report = to_subspace(loaded, replace(subspace, fixed="given"), (1,))
    assert next(again.parameters()).device.type == device
    return [file_digests(folder / "exported"), digests(again), repr(report), mean_loss(again, [ids_of(0)], device)]


def commands(family, device, folder):
    """The command line: train, resume, eval, generate, export, import and doctor."""
    tokens, file, run = folder / "tokens", folder / "run.toml", folder / "run"
    thinpipe.tokenize("sample:validation", tokens, validation_sources=["sample:validation"], vocab_size=300)
    config = run_settings(model_settings(family, f"subspace-{TABLES[0]}"))
    config = replace(
        config,
        job=JobConfig(dump_folder=run),
        data=DataConfig(path=tokens),
        training=replace(config.training, device=device),
        checkpoint=CheckpointConfig(interval=2),
        validation=ValidationConfig(freq=2, steps=1),
    )
    file.write_text(dump_toml(config))
    printed("train", file)
    shutil.rmtree(run / f"checkpoints/step-{STEPS:08}")
    printed("train", file)
    told = [event for event in read_events(run / "events.jsonl") if isinstance(event, Step | Validated | BasisChanged)]
    evaluated = json.loads(printed("eval", run, "--max-batches", 2, "--device", device).splitlines()[-1])
    text = printed("generate", run, "--max-new-tokens", 8, "--device", device)
    printed("export", run, folder / "exported")
    cast = ("--subspace-width", WIDTH, "--boundaries", 1, "--data", tokens)
    imported = printed("import", folder / "exported", folder / "imported", *cast).splitlines()[0]
    printed("doctor", "--device", device)
    numbers = [getattr(event, name) for event in told for name in ("step", "loss", "grad_norm") if hasattr(event, name)]
    tensors = file_digests(CheckpointFolder(folder / "imported/checkpoints").newest_complete()[0].path)
    exported = file_digests(folder / "exported")
    del exported["README.md"]  # it has the settings, and their device
    return [numbers, evaluated["loss"], text, imported, exported, tensors]


def printed(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main([*map(str, arguments)]) == 0, output.getvalue()
    return output.getvalue()


# The list.


def entries():
    family = next(iter(FAMILIES))  # boundaries and commands are the same for all
    for name, settings in codecs():
        yield Entry("codec", text_of([name, *settings.items()]), partial(coded, name, settings))
    sequentials = [{"format": name} for name in FORMATS] + compressions()
    for encoding in (encoding for encoding in sequentials if encoding.get("feedback") != "aqsgd"):
        both = boundary_of(encoding, encoding)
        yield Entry("CompressedSequential", text_of(encoding.values()), partial(sequential, both))
    for boundary in boundaries():
        model = model_settings(family, f"subspace-{TABLES[0]}" if boundary.method == "subspace" else "dense")
        config = run_settings(model, boundary=boundary)
        yield Entry("train", text_of_boundary(boundary), partial(trained, config))
    for row in trainings():
        yield Entry("train", text_of(row.values()), partial(trained, training_settings(**row)))
    for name in FAMILIES:
        for model in MODELS:
            yield Entry("evaluate and generate", text_of([name, model]), partial(used, name, model))
        for fixed in TABLES:
            for free_last in (True, False):
                labels = [name, fixed, "free_last" if free_last else "confined"]
                yield Entry(
                    "to_dense, export, import, to_subspace", text_of(labels), partial(converted, name, fixed, free_last)
                )
    yield Entry("command line", family, partial(commands, family))


def training_settings(family, model, second_moment, precision, offload, execution):
    config = run_settings(
        model_settings(family, model),
        optimizer=OptimizerConfig(second_moment=second_moment),
        execution=ExecutionConfig(**({} if execution == "plain" else dict([execution]))),
    )
    return replace(config, training=replace(config.training, precision=precision, offload=offload))


def text_of_boundary(boundary):
    def encoding(number_format, compression):
        changed = [value for value in vars(compression).values() if value not in (None, False, "none")]
        return text_of(changed or [number_format])

    states, gradients = encoding(boundary.forward, boundary.states), encoding(boundary.backward, boundary.gradients)
    return f"{boundary.method}: {states} / {gradients}"


def text_of(values):
    return " ".join(" ".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values)


ENTRIES = [*entries()]

if __name__ == "__main__":
    for entry in ENTRIES:
        print(entry)
    counts = Counter(entry.kind for entry in ENTRIES)
    print(f"{len(ENTRIES)} entries: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
