"""The loss of chats is the mean over the trained tokens of the whole batch, whatever micro-batches they came in:
compared with float64 by hand."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.data.chats import flagged, write_run_data
from tests.programs import steps_of
from tests.reference.language import SyntheticLanguage
from thinpipe.checkpoint import Checkpoint
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import DataConfig, ParallelismConfig, RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import checkpoints_path
from thinpipe.core.token_flags import BEGINS, ID_MASK, TRAINED
from thinpipe.data import Cursor
from thinpipe.pipeline.chat_loss import positions_in_documents
from thinpipe.training.data_loading import DatasetInfo, LocalTokens
from thinpipe.training.engine import Engine
from thinpipe.training.mean_loss import mean_loss
from thinpipe.training.recomputed_loss import recompute_losses
from thinpipe.training.step_vector import StepVector, trained_scale
from thinpipe.training.trainer import Trainer


def batch_of(config: RunConfig, number: int = 0, seed: int = 3) -> np.ndarray:
    ids_BW = SyntheticLanguage(64, seed=1).batch(number, config.training.global_batch_size, config.training.seq_len)
    return flagged(ids_BW.numpy(), seed=seed)


def engine_of(config: RunConfig, **training: object) -> Engine:
    config = replace(config, training=replace(config.training, **training))
    return Engine(config, config.model.resolve(64), chats=True)


@pytest.fixture
def uncut(run_config):
    """Without boundaries, which round to float32."""
    return replace(run_config, model=replace(run_config.model, boundaries=(), subspace=SubspaceConfig()))


def by_hand(engine: Engine, *batches_BW: np.ndarray) -> tuple[torch.Tensor, int]:
    """Mean loss in float64 over the trained tokens of all batches at once."""
    flagged_BW = torch.from_numpy(np.concatenate(batches_BW))
    ids_BW = flagged_BW & ID_MASK
    logits = engine.model(ids_BW[:, :-1]).double()
    losses = F.cross_entropy(logits.flatten(0, 1), ids_BW[:, 1:].flatten(), reduction="none")
    trained = (flagged_BW[:, 1:] & TRAINED != 0).flatten()
    return losses[trained].sum() / trained.sum(), int(trained.sum())


@pytest.mark.parametrize("size", [1, 2, 8])
def test_loss_gradients_and_norm_are_those_of_the_mean_over_trained_tokens(uncut, size):
    config = replace(uncut, parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=size))
    engine, ids_BW = engine_of(config, precision="fp64", max_norm=math.inf), batch_of(config)
    wanted, _ = by_hand(engine, ids_BW)
    wanted.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in engine.parameters.items()}
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    outcome = engine.step(0, ids_BW, lr=0.0)
    assert outcome.loss == pytest.approx(wanted.item(), rel=1e-12)
    assert outcome.grad_norm == pytest.approx(norm, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(engine.parameters[name].grad, gradient, rtol=1e-9, atol=1e-14)
    trained_B = (ids_BW[:, 1:] & TRAINED != 0).sum(axis=1)
    assert trained_B[0] == 0 < trained_B[1:].min() < trained_B.max() / 2, "rows alike would hide a mean of means"


def test_clipping_uses_the_norm_of_the_mean_over_trained_tokens(run_config):
    engine, ids_BW = engine_of(run_config, precision="fp64", max_norm=0.01), batch_of(run_config)
    outcome = engine.step(0, ids_BW, lr=0.0)
    squares = [parameter.grad.square().sum().item() for parameter in engine.parameters.values()]
    assert outcome.grad_norm > 0.01
    assert math.sqrt(sum(squares)) == pytest.approx(0.01, rel=1e-3)


def test_sums_in_bfloat16_are_scaled_too(run_config):
    """The update sees the gradients times `gradient_factor`."""
    engine, ids_BW = engine_of(run_config, precision="bf16", max_norm=math.inf), batch_of(run_config)
    outcome = engine.step(0, ids_BW, lr=0.0)
    squares = [parameter.grad.float().square().sum().item() for parameter in engine.parameters.values()]
    applied = engine.optimizer.gradient_factor * math.sqrt(sum(squares))
    assert outcome.gradient_scale > 1
    assert applied == pytest.approx(outcome.grad_norm, rel=1e-3)


def test_validation_is_the_mean_over_the_trained_tokens_of_all_batches(uncut):
    engine = engine_of(uncut, precision="fp64")
    batches = [batch_of(uncut, 1, seed=1), batch_of(uncut, 2, seed=2)]
    engine.model.eval()
    wanted, trained = by_hand(engine, *batches)
    loss, tokens = engine.evaluate(batches)
    assert (loss, tokens) == (pytest.approx(wanted.item(), rel=1e-12), trained)
    assert mean_loss(engine.model, batches, "cpu", chats=True) == (pytest.approx(wanted.item(), rel=1e-12), trained)


def test_a_batch_without_a_trained_token_has_no_loss_and_no_gradient(run_config):
    engine = engine_of(run_config)
    silent = batch_of(run_config) & ~TRAINED
    outcome = engine.step(0, silent, lr=1e-3)
    assert (outcome.loss, outcome.grad_norm, outcome.fault) == (0.0, 0.0, None)
    assert all(parameter.isfinite().all() for parameter in engine.parameters.values())
    loss, tokens = engine.evaluate([silent])
    assert math.isnan(loss)
    assert tokens == 0


def test_plain_text_computed_as_chats_that_are_trained_on_as_a_whole(run_config):
    ids_BW = batch_of(run_config) & ID_MASK
    plain = Engine(run_config, run_config.model.resolve(64)).step(0, ids_BW, lr=1e-3)
    whole = engine_of(run_config).step(0, ids_BW | TRAINED, lr=1e-3)
    assert whole.gradient_scale == plain.gradient_scale == 1.0
    assert whole.loss == pytest.approx(plain.loss, rel=1e-6)


@pytest.mark.parametrize(
    ("said", "scale"), [(8.0, 1.0), (2.0, 4.0), (0.0, 0.0), (9.0, None), (-1.0, None), (0.5, None)]
)
def test_a_number_of_trained_tokens_that_cannot_be_is_no_number(said, scale):
    assert trained_scale(said, 8) == scale if scale is not None else math.isnan(trained_scale(said, 8))
    assert math.isnan(trained_scale(math.nan, 8))


def test_the_number_of_trained_tokens_has_a_place_for_chats_alone():
    sizes = [StepVector(["a"], boundaries=0, processes=1, batch_tokens=tokens).size for tokens in (None, 8)]
    assert sizes[1] == sizes[0] + 1
    vector = StepVector(["a"], boundaries=0, processes=1, batch_tokens=8)
    given = {"stops": 0.0, "of_ends": {}, "of_process": {}, "rank": 0}
    numbers = vector.pack(loss=1.5, gradient_norms={"a": 2.0}, trained_tokens=2, **given)
    assert (vector.loss(numbers), vector.gradient_norms(numbers)) == (6.0, {"a": 8.0})


def test_positions_begin_again_with_each_document():
    begins = torch.tensor([[1, 0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    assert positions_in_documents(begins).tolist() == [
        [0, 1, 2, 0, 1, 0, 1],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 0, 0, 0, 1, 2],
    ]


def test_our_own_families_refuse_packed_rows(run_config):
    with pytest.raises(UserError, match=r"training.packing: the attention of llama does not see where a chat begins"):
        engine_of(run_config, packing=True)
    model = Engine(run_config, run_config.model.resolve(64)).model
    ids_BT = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="several texts in a row"):
        model.segments[0](ids_BT, position_ids_BT=ids_BT)


@pytest.fixture
def chat_config(run_config, tmp_path):
    return replace(run_config, data=DataConfig(path=write_run_data(tmp_path / "chats", longest=17)))


def test_a_run_on_chats_resumes_exactly_and_its_losses_can_be_computed_again(chat_config, tmp_path):
    Trainer(chat_config).train()
    losses = {event.step: event.loss for event in steps_of(chat_config)}
    assert losses[12] < losses[1]
    folder = checkpoints_path(chat_config.job.dump_folder)
    source = LocalTokens(chat_config)
    found = recompute_losses(Checkpoint.open(folder / "step-00000004"), source, source.batch(Cursor(samples_seen=3)))
    assert found.next_step == losses[5]
    again = replace(chat_config, job=replace(chat_config.job, dump_folder=tmp_path / "again"))
    (checkpoints_path(again.job.dump_folder)).mkdir(parents=True)
    (folder / "step-00000008").rename(checkpoints_path(again.job.dump_folder) / "step-00000008")
    Trainer(again).train()
    assert {event.step: event.loss for event in steps_of(again)} == {step: losses[step] for step in range(9, 13)}


def test_the_facts_of_chats_reach_every_process_and_those_of_text_are_as_before(chat_config, run_config):
    facts = LocalTokens(chat_config).dataset_info
    assert (facts.chats, facts.bits_per_byte_per_nat) == (True, None)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=DatasetInfo) == facts
    assert b"chats" not in msgspec.json.encode(LocalTokens(run_config).dataset_info)
    batch = LocalTokens(chat_config).batch(Cursor())
    assert (batch[:, 0] & BEGINS).all()


def test_packing_cannot_be_changed_within_a_run(chat_config, monkeypatch):
    Trainer(chat_config).train()
    monkeypatch.setattr("thinpipe.training.engine.refuse_packing", lambda _: None)
    trainer = Trainer(replace(chat_config, training=replace(chat_config.training, packing=True)))
    with pytest.raises(UserError, match=r"training.packing has changed since .* decides which samples come next"):
        trainer.train()
