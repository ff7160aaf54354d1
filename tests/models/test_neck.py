"""Necks: what crosses, what is made of the ids, and that decoding a token at a time gives the same."""

from dataclasses import replace

import pytest
import torch

from thinpipe.core.errors import UserError
from thinpipe.models import PRESETS, build, materialise
from thinpipe.models.config import Execution, NeckConfig, SubspaceConfig
from thinpipe.models.memory import Memory
from thinpipe.subspace import RowwiseAdamW, Writer
from thinpipe.subspace.stiefel import is_orthonormal

KEEL = NeckConfig(width=8, anchor_rank=4, first_rank=4, ngram_rows=64, ngram_rank=4)
FAR = NeckConfig(width=8, anchor_rank=4, anchor_reach=3, first_rank=4)
NECKS = {
    "keel": KEEL,
    "keel that looks back": FAR,
    "learned": NeckConfig(kind="learned", width=8, anchor_rank=4),
    "bottleneck": NeckConfig(kind="bottleneck", width=8),
}


def model_of(neck, **changes):
    config = replace(PRESETS["llama-tiny"], vocab_size=97, dim=32, n_heads=2, n_kv_heads=1, hidden_dim=48)
    config = replace(config, max_seq_len=16, boundaries=(1, 2, 3), neck=neck, **changes)
    return materialise(build(config), seed=3)


def some_ids(seed=0, tokens=16):
    return torch.randint(97, (2, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("neck", NECKS.values(), ids=NECKS)
def test_as_many_numbers_cross_as_the_neck_is_wide(neck):
    model, ids = model_of(neck), some_ids()
    state = model.segments[0](ids)
    assert state.shape == (2, 16, 8)
    assert model.segments[1](ids, state).shape == (2, 16, 8)
    assert model.config.state_width == 8


def test_blocks_that_write_nothing_leave_the_message_of_a_keel_as_it_was():
    model, ids = model_of(KEEL), some_ids()
    for module in model.modules():
        if isinstance(module, Writer):
            module.weight.data.zero_()
    state = model.segments[0](ids)
    torch.testing.assert_close(model.segments[1](ids, state), state, rtol=0, atol=1e-7)
    assert torch.equal(state, model.first(ids)[..., :8])


def test_a_segment_starts_from_the_pairs_of_its_own_tokens():
    anchors = model_of(KEEL).necks[1].anchors
    ids = some_ids()
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % 97
    changed = (anchors(ids) != anchors(other)).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [5, 6], "its own row, and that of the pair with the next"


def test_a_segment_looks_back_as_far_as_it_shall():
    anchors = model_of(FAR).necks[1].anchors
    ids = some_ids()
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % 97
    changed = (anchors(ids) != anchors(other)).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [5, 6, 7]


def test_pairs_are_spread_over_all_rows():
    pairs = torch.cartesian_prod(torch.arange(97), torch.arange(97))
    counts = torch.bincount(model_of(KEEL).necks[1].anchors.pair_rows(pairs, None)[:, 1], minlength=64)
    mean = 97 * 97 / 64
    assert mean / 2 < counts.min() <= counts.max() < mean * 2


@pytest.mark.parametrize("neck", NECKS.values(), ids=NECKS)
def test_token_by_token_gives_the_logits_of_the_whole_text(neck):
    model, ids = model_of(neck), some_ids()
    with torch.no_grad():
        whole, memory = model(ids), Memory(16)
        pieces = [model(piece, memory) for piece in ids.split([5, 1, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("neck", NECKS.values(), ids=NECKS)
def test_without_autocast_nothing_is_computed_in_bfloat16(neck):
    model, ids = model_of(neck), some_ids()
    for parameter in model.parameters():  # the networks of a bottleneck begin with next to nothing
        parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    exact = materialise(build(model.config), seed=3, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(ids).double(), exact(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("neck", NECKS.values(), ids=NECKS)
def test_messages_and_gradients_have_the_dtype_of_the_weights(neck, dtype):
    model = materialise(build(model_of(neck).config), seed=3, dtype=dtype)
    state = model.segments[0](some_ids())
    assert state.dtype == dtype
    model(some_ids()).float().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("neck", NECKS.values(), ids=NECKS)
def test_computing_blocks_again_changes_no_gradient(neck):
    model, ids = model_of(neck), some_ids()
    gradients = []
    for again in (False, True):
        model.execute(Execution(checkpoint_activations=again))
        model.zero_grad()
        model(ids).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


def test_projectors_begin_alike_learn_and_stay_orthonormal():
    model, ids = model_of(NECKS["learned"]), some_ids()
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
        ({"neck": NeckConfig(anchor_rank=4)}, "no width"),
        ({"neck": NeckConfig(width=64)}, "between 1 and dim"),
        ({"neck": NeckConfig(width=8), "boundaries": ()}, "there is none"),
        ({"neck": NeckConfig(width=8), "subspace": SubspaceConfig(width=4)}, "set one of them"),
        ({"neck": NeckConfig(width=8, hidden=4)}, "bottleneck"),
        ({"neck": NeckConfig(width=8, anchor_reach=2)}, "set neck.anchor_rank"),
        ({"neck": NeckConfig(width=8, anchor_rank=4, anchor_reach=17)}, "between 1 and 16"),
        ({"neck": NeckConfig(width=8, first_rank=33)}, "between 0 and 32"),
        ({"neck": NeckConfig(width=8, ngram_rank=4)}, "set neck.ngram_rows"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, words):
    config = model_of(KEEL).config
    with pytest.raises(UserError, match=words):
        replace(config, **changes)
