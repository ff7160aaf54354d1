"""A run on several folders of tokens: the same samples alone, resumed, in processes and from a hub; its validation
losses; what it refuses."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from tests.data.chats import write_run_data
from tests.programs import files_of
from tests.reference.language import SyntheticLanguage
from tests.run_fixtures import VOCABULARY
from tests.swarm.peer.test_remote_tokens import Hub
from tests.train.test_processes import ENVIRONMENT, placed
from tests.train.test_trainer import assert_same_checkpoint, events, in_folder, with_steps
from tests.warm import WarmProcess
from thinpipe.checkpoint import find_checkpoint
from thinpipe.cli import evaluate, main
from thinpipe.config.commands import EvalConfig
from thinpipe.config.plan import PlanConfig
from thinpipe.config.run import DataConfig, RunConfig
from thinpipe.config.run_data import MixtureSource
from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import DataError, UserError
from thinpipe.core.event_text import format_event
from thinpipe.core.events import Step, Validated, read_events
from thinpipe.core.foreign import decode_foreign
from thinpipe.core.run_folder import step_folder
from thinpipe.data import Cursor, ShardWriter, Vocabulary
from thinpipe.doctor import before_start
from thinpipe.doctor.run import run_findings
from thinpipe.monitor.exporters import scalars_of
from thinpipe.planning.model_shape import has_chats, resolve_model
from thinpipe.swarm.hub.run_settings import settings_for_peers
from thinpipe.swarm.hub.training_host import TrainingHost
from thinpipe.swarm.peer.remote_run import RemoteTokens
from thinpipe.training.console import LineDisplay
from thinpipe.training.data_loading import DatasetInfo, LocalTokens
from thinpipe.training.trainer import Trainer


def write_tokens(folder: Path, seed: int, *, validation: int = 1500, vocabulary: Vocabulary = VOCABULARY) -> Path:
    """A folder of a synthetic language; `validation`: tokens for validation, 0 for none."""
    ids = SyntheticLanguage(64, seed=seed).batch(0, 1, 4000 + validation)[0].numpy().astype(np.uint32)
    for side, part in (("train", ids[:4000]), ("validation", ids[4000:])):
        if len(part) > 1:
            with ShardWriter(folder / side, vocabulary, source="synthetic") as writer:
                writer.add(part, text_nbytes=(len(part) + 1) * (2 + seed))
                writer.finish()
    return folder


def of(*sources: tuple[Path, float]) -> DataConfig:
    return DataConfig(mixture=tuple(MixtureSource(path=path, weight=weight) for path, weight in sources))


@pytest.fixture
def other(tmp_path) -> Path:
    return write_tokens(tmp_path / "other", 2)


@pytest.fixture
def mixed(run_config, tokens, other) -> RunConfig:
    return replace(run_config, data=of((tokens, 0.75), (other, 0.25)))


def losses(config):
    return [(event.step, event.loss) for event in read_events(config.job.dump_folder / "events.jsonl")
            if isinstance(event, Step)]  # fmt: skip


def test_a_resumed_run_reads_what_an_undisturbed_one_reads(mixed):
    Trainer(mixed).train()
    resumed = in_folder(mixed, "resumed")
    checkpoint = Path("checkpoints", step_folder(4))
    shutil.copytree(mixed.job.dump_folder / checkpoint, resumed.job.dump_folder / checkpoint)
    Trainer(resumed).train()
    assert losses(resumed) == losses(mixed)[4:]
    assert_same_checkpoint(find_checkpoint(mixed.job.dump_folder), find_checkpoint(resumed.job.dump_folder))


def test_a_batch_has_samples_of_all_sources_by_weight(mixed, tokens, other):
    source, samples = LocalTokens(mixed), {}
    for name, folder in (("first", tokens), ("second", other)):
        alone = LocalTokens(replace(mixed, data=DataConfig(path=folder)))
        size = len(alone._batches.samples)
        samples[name] = {tuple(row) for row in alone._batches.samples.read(np.arange(size)).tolist()}
    batch = source.batch(Cursor(samples_seen=40))
    found = ["second" if tuple(row) in samples["second"] else "first" for row in batch.tolist()]
    assert found.count("second") == 2
    others = [row for row, name in zip(batch.tolist(), found, strict=True) if name == "first"]
    assert all(tuple(row) in samples["first"] for row in others)


def test_a_mixture_of_one_is_a_run_on_that_folder(run_config, tokens):
    one, alone = LocalTokens(replace(run_config, data=of((tokens, 3)))), LocalTokens(run_config)
    for seen in (0, 8, 5000):
        assert np.array_equal(one.batch(Cursor(samples_seen=seen)), alone.batch(Cursor(samples_seen=seen)))
    assert one.dataset_info.sha256 == alone.dataset_info.sha256


def test_other_processes_and_checkpoints_do_not_know_where_the_tokens_are(mixed):
    Trainer(mixed).train()
    config = placed(mixed, 2, "processes")
    config.job.dump_folder.mkdir(parents=True)
    (config.job.dump_folder / "wanted.toml").write_text(dump_toml(config))
    file = config.job.dump_folder / "wanted.toml"
    with open(file.with_suffix(".txt"), "w") as printed:
        process = WarmProcess("thinpipe", "train", file, env=ENVIRONMENT, stdout=printed)
        assert process.wait(timeout=400) == 0, file.with_suffix(".txt").read_text()
    assert losses(config) == losses(mixed)
    assert [event.sources for event in events(config, Validated)] == [
        event.sources for event in events(mixed, Validated)
    ]
    assert "mixture" not in dump_toml(settings_for_peers(mixed))


def test_peers_of_a_hub_read_what_one_process_reads(mixed, tmp_path, programs):
    config = replace(mixed, parallelism=replace(mixed.parallelism, pipeline_parallel_microbatch_size=2))
    Trainer(config).train()
    hosted, file = in_folder(config, "hub"), tmp_path / "run.toml"
    file.write_text(dump_toml(hosted))
    up = programs("up", "up", file, "--peers", 2)
    assert up.finish() == 0, up.printed
    assert files_of(hosted, 12) == files_of(config, 12)
    assert losses(hosted) == losses(config)
    assert [event.sources for event in events(hosted, Validated)] == [
        event.sources for event in events(config, Validated)
    ]


def test_a_hub_serves_the_samples_and_says_whose_the_validation_text_is(mixed):
    host = TrainingHost(mixed, LineDisplay(Console(file=io.StringIO()), log_freq=1))
    try:
        local = LocalTokens(mixed)
        info = decode_foreign(msgspec.json.encode(local.dataset_info), DatasetInfo, form="json")
        assert info == local.dataset_info
        remote = RemoteTokens(Hub(host.tokens), info, mixed)
        for seen in (0, 8, 16, 800):
            assert np.array_equal(remote.batch(Cursor(samples_seen=seen)), local.batch(Cursor(samples_seen=seen)))
        for found, expected in zip(remote.validation, local.validation, strict=True):
            assert np.array_equal(found, expected)
    finally:
        host.close()


@pytest.mark.parametrize("change", ["weights", "order", "one folder", "text"])
def test_another_mixture_is_refused_on_resume(change, mixed, tokens, other, tmp_path):
    Trainer(with_steps(mixed, 4)).train()
    data = {
        "weights": of((tokens, 0.7), (other, 0.3)),
        "order": of((other, 0.25), (tokens, 0.75)),
        "one folder": DataConfig(path=tokens),
        "text": of((tokens, 0.75), (write_tokens(tmp_path / "third", 3), 0.25)),
    }[change]
    with pytest.raises(UserError, match=r"was trained on other tokens than those of .*: set \[data\] to what the run"):
        Trainer(replace(mixed, data=data)).train()
    with pytest.raises(UserError, match=r"was trained on other tokens than those of"):
        TrainingHost(replace(mixed, data=data), LineDisplay(Console(file=io.StringIO()), log_freq=1))


def test_the_same_mixture_in_other_words_goes_on(mixed, tokens, other, tmp_path):
    Trainer(with_steps(mixed, 4)).train()
    moved = other.rename(tmp_path / "moved")
    assert Trainer(replace(mixed, data=of((tokens, 3), (moved, 1)))).train() == "finished"


def test_the_validation_loss_is_the_mean_of_the_sources_by_weight(mixed, tokens):
    Trainer(with_steps(mixed, 6)).train()
    (event,) = events(mixed, Validated)
    first, second = event.sources
    assert (first.name, second.name) == (tokens.name, "other")
    assert event.loss == pytest.approx(0.75 * first.loss + 0.25 * second.loss, rel=1e-12)
    assert event.tokens == first.tokens + second.tokens == 2 * 2 * 8 * 16
    nats_a_byte = event.loss / (0.75 * 3 + 0.25 * 4)
    assert event.bits_per_byte == pytest.approx(nats_a_byte / np.log(2), rel=0.01)
    assert f"({tokens.name} {first.loss:.4f}, other {second.loss:.4f})" in format_event(event)
    assert scalars_of(event)["validation_loss/other"] == second.loss


def test_sources_without_validation_text_count_in_no_validation_loss(mixed, tokens, tmp_path):
    silent = write_tokens(tmp_path / "silent", 4, validation=0)
    config = with_steps(replace(mixed, data=of((silent, 0.9), (tokens, 0.1))), 6)
    Trainer(config).train()
    (event,) = events(config, Validated)
    assert [source.name for source in event.sources] == [tokens.name]
    assert event.loss == event.sources[0].loss


def test_folders_of_one_name_are_numbered(mixed, tmp_path):
    folders = [write_tokens(tmp_path / place / "tokens", seed) for seed, place in enumerate(("a", "b"), 5)]
    info = LocalTokens(replace(mixed, data=of(*((folder, 1) for folder in folders)))).dataset_info
    assert [source.name for source in info.validation_sources] == ["tokens 1", "tokens 2"]


def test_one_tokenizer_and_one_kind(mixed, tokens, tmp_path):
    strange = write_tokens(
        tmp_path / "strange", 3, vocabulary=Vocabulary(size=64, end_of_text_id=0, tokenizer_sha256="1" * 64)
    )
    with pytest.raises(
        DataError, match=rf"{tokens}/train and {strange}/train were made with different tokenizers: tok"
    ):
        LocalTokens(replace(mixed, data=of((tokens, 1), (strange, 1))))
    chats = write_run_data(tmp_path / "chats", longest=17)
    with pytest.raises(DataError, match=rf"{tokens}/train and {chats}/train: one has chats and the other plain text"):
        LocalTokens(replace(mixed, data=of((tokens, 1), (chats, 1))))


def test_chats_are_mixed_too(mixed, tmp_path):
    folders = [write_run_data(tmp_path / name, longest=17) for name in ("one", "two")]
    config = replace(mixed, data=of((folders[0], 2), (folders[1], 1)))
    assert Trainer(config).train() == "finished"
    assert [source.bits_per_byte for source in events(config, Validated)[0].sources] == [None, None]


def test_plan_doctor_and_eval_know_mixtures(mixed, tokens, other, tmp_path, capsys):
    file = tmp_path / "mixed.toml"
    file.write_text(dump_toml(mixed))
    plan = load_toml(file, PlanConfig)
    assert plan.data == mixed.data
    assert "the vocabulary of 64 tokens" in resolve_model(plan, None)[1][0]
    assert not has_chats(plan)
    before_start.train(mixed)
    lost = replace(mixed, data=of((tokens, 1), (tmp_path / "nowhere", 1)))
    before_start.train(lost)
    said = capsys.readouterr()
    assert f"none in {tmp_path / 'nowhere'}" in said.out + said.err
    Trainer(with_steps(mixed, 4)).train()
    with pytest.raises(UserError, match=rf"was trained on a mixture: pass --data with one of its folders: {tokens}, "):
        evaluate.run(EvalConfig(run=mixed.job.dump_folder))
    assert main(["eval", str(mixed.job.dump_folder), "--data", str(other)]) == 0
    data = run_findings(mixed)[0]
    assert (data.state, f"{tokens}, {other}: a vocabulary of 64" in data.text) == ("ok", True)
    data = run_findings(lost)[0]
    assert (data.state, "data.mixture" in data.fix) == ("problem", True)
