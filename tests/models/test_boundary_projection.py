"""Necks: what crosses, what is made of the ids, and that decoding a token at a time gives the same."""

from dataclasses import replace

import pytest
import torch

from thinpipe.config.model import ExecutionConfig, ProjectionConfig, SubspaceConfig
from thinpipe.core.errors import UserError
from thinpipe.models import PRESETS, build, materialise
from thinpipe.models.kv_cache import KVCache
from thinpipe.optim import RowwiseAdamW
from thinpipe.subspace import ResidualWriter
from thinpipe.subspace.parameter_tags import is_orthonormal

KEEL = ProjectionConfig(width=8, token_prior_rank=4, embedding_rank=4, bigram_rows=64, bigram_rank=4)
FAR = ProjectionConfig(width=8, token_prior_rank=4, token_prior_window=3, embedding_rank=4)
PROJECTION_CONFIGS = {
    "keel": KEEL,
    "keel that looks back": FAR,
    "learned": ProjectionConfig(kind="learned", width=8, token_prior_rank=4),
    "bottleneck": ProjectionConfig(kind="bottleneck", width=8),
}


def model_of(projection, **changes):
    config = replace(PRESETS["llama-tiny"], vocab_size=97, dim=32, n_heads=2, n_kv_heads=1, hidden_dim=48)
    config = replace(config, max_seq_len=16, boundaries=(1, 2, 3), projection=projection, **changes)
    return materialise(build(config), seed=3)


def some_ids(seed=0, tokens=16):
    return torch.randint(97, (2, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("projection", PROJECTION_CONFIGS.values(), ids=PROJECTION_CONFIGS)
def test_state_width_is_the_projection_width(projection):
    model, ids = model_of(projection), some_ids()
    state = model.segments[0](ids)
    assert state.shape == (2, 16, 8)
    assert model.segments[1](ids, state).shape == (2, 16, 8)
    assert model.config.state_width == 8


def test_blocks_that_write_nothing_leave_the_message_of_a_keel_as_it_was():
    model, ids = model_of(KEEL), some_ids()
    for module in model.modules():
        if isinstance(module, ResidualWriter):
            module.weight.data.zero_()
    state = model.segments[0](ids)
    torch.testing.assert_close(model.segments[1](ids, state), state, rtol=0, atol=1e-7)
    assert torch.equal(state, model.first(ids)[..., :8])


def test_a_segment_starts_from_the_pairs_of_its_own_tokens():
    token_prior = model_of(KEEL).projections[1].token_prior
    ids = some_ids()
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % 97
    changed = (token_prior(ids) != token_prior(other)).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [5, 6], "its own row, and that of the pair with the next"


def test_a_segment_looks_back_as_far_as_it_shall():
    token_prior = model_of(FAR).projections[1].token_prior
    ids = some_ids()
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % 97
    changed = (token_prior(ids) != token_prior(other)).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [5, 6, 7]


def test_pairs_are_spread_over_all_rows():
    bigrams = torch.cartesian_prod(torch.arange(97), torch.arange(97))
    counts = torch.bincount(model_of(KEEL).projections[1].token_prior.bigram_hashes(bigrams, None)[:, 1], minlength=64)
    mean = 97 * 97 / 64
    assert mean / 2 < counts.min() <= counts.max() < mean * 2


@pytest.mark.parametrize("projection", PROJECTION_CONFIGS.values(), ids=PROJECTION_CONFIGS)
def test_token_by_token_gives_the_logits_of_the_whole_text(projection):
    model, ids = model_of(projection), some_ids()
    with torch.no_grad():
        whole, cache = model(ids), KVCache(16)
        pieces = [model(piece, cache) for piece in ids.split([5, 1, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("projection", PROJECTION_CONFIGS.values(), ids=PROJECTION_CONFIGS)
def test_without_autocast_nothing_is_computed_in_bfloat16(projection):
    model, ids = model_of(projection), some_ids()
    for parameter in model.parameters():  # the networks of a bottleneck begin with next to nothing
        parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    exact = materialise(build(model.config), seed=3, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(ids).double(), exact(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("projection", PROJECTION_CONFIGS.values(), ids=PROJECTION_CONFIGS)
def test_messages_and_gradients_have_the_dtype_of_the_weights(projection, dtype):
    model = materialise(build(model_of(projection).config), seed=3, dtype=dtype)
    state = model.segments[0](some_ids())
    assert state.dtype == dtype
    model(some_ids()).float().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("projection", PROJECTION_CONFIGS.values(), ids=PROJECTION_CONFIGS)
def test_computing_blocks_again_changes_no_gradient(projection):
    model, ids = model_of(projection), some_ids()
    gradients = []
    for again in ("none", "block", "segment"):
        model.set_execution(ExecutionConfig(checkpoint_activations=again))
        model.zero_grad()
        model(ids).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(
        torch.equal(plain, block) and torch.equal(plain, segment)
        for plain, block, segment in zip(*gradients, strict=True)
    )


def test_projectors_begin_alike_learn_and_stay_orthonormal():
    model, ids = model_of(PROJECTION_CONFIGS["learned"]), some_ids()
    columns = {name: p for name, p in model.named_parameters() if is_orthonormal(p)}
    assert len(columns) == 6
    first = next(iter(columns.values())).detach().clone()
    assert all(torch.equal(p, first) for p in columns.values())
    optimizer = RowwiseAdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        logits = model(ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 1
    for name, p in columns.items():
        torch.testing.assert_close(p.T @ p, torch.eye(8), rtol=0, atol=1e-5)
        assert (p - first).norm() > 0.01, name
        assert optimizer.state[p]["exp_avg_sq"].shape == (1, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"projection": ProjectionConfig(token_prior_rank=4)}, "no width"),
        ({"projection": ProjectionConfig(width=64)}, "between 1 and dim"),
        ({"projection": ProjectionConfig(width=8), "boundaries": ()}, "there is none"),
        ({"projection": ProjectionConfig(width=8), "subspace": SubspaceConfig(width=4)}, "set one of them"),
        ({"projection": ProjectionConfig(width=8, hidden=4)}, "bottleneck"),
        ({"projection": ProjectionConfig(width=8, token_prior_window=2)}, "set projection.token_prior_rank"),
        ({"projection": ProjectionConfig(width=8, token_prior_rank=4, token_prior_window=17)}, "between 1 and 16"),
        ({"projection": ProjectionConfig(width=8, embedding_rank=33)}, "between 0 and 32"),
        ({"projection": ProjectionConfig(width=8, bigram_rank=4)}, "set projection.bigram_rows"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, words):
    config = model_of(KEEL).config
    with pytest.raises(UserError, match=words):
        replace(config, **changes)
