"""Models with necks in transformers: the same logits and the same text, however they are decoded, without thinpipe."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from thinpipe.checkpoint import CheckpointFolder, new_manifest, state_by_layer
from thinpipe.cli import main
from thinpipe.config.model import ProjectionConfig
from thinpipe.core.errors import UserError
from thinpipe.models import PRESETS, RopeScaling, build, materialise
from thinpipe.models.generate import generate
from thinpipe.models.hf import projection as projection_export
from thinpipe.models.hf import weights
from thinpipe.models.to_dense import to_dense

transformers = pytest.importorskip("transformers")

ALL = ProjectionConfig(
    width=8, token_prior_rank=4, token_prior_window=3, embedding_rank=4, bigram_rows=64, bigram_rank=4
)
PROJECTION_CONFIGS = {
    "keel-bare": ProjectionConfig(width=8),
    "keel-tokens": ProjectionConfig(width=8, token_prior_rank=4),
    "keel-far": ProjectionConfig(width=8, token_prior_rank=4, token_prior_window=4),
    "keel-pairs": ProjectionConfig(width=8, bigram_rows=64, bigram_rank=4),
    "keel-all": ALL,
    "learned-bare": ProjectionConfig(kind="learned", width=8),
    "learned-all": replace(ALL, kind="learned"),
    "bottleneck-bare": ProjectionConfig(kind="bottleneck", width=8),
    "bottleneck-all": replace(ALL, kind="bottleneck", hidden=12),
}
ROPE = RopeScaling(factor=4.0, original_max_position_embeddings=16)
LENGTH = 48
PAD = 0


def model_of(projection, preset="llama-tiny"):
    sizes = {"vocab_size": 97, "dim": 32, "n_heads": 2, "max_seq_len": LENGTH, "boundaries": (1, 3)}
    if preset == "llama-tiny":
        sizes |= {"n_kv_heads": 1, "hidden_dim": 48, "rope_scaling": ROPE}
    model = materialise(build(replace(PRESETS[preset], **sizes, projection=projection)), seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # large, and no unit norm left: every tensor shows in the logits
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def modules_of_its_own(tmp_path_factory):
    """Where transformers puts code that it was told to trust."""
    kept = transformers.dynamic_module_utils.HF_MODULES_CACHE
    transformers.dynamic_module_utils.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("modules"))
    yield
    transformers.dynamic_module_utils.HF_MODULES_CACHE = kept


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Ours and theirs by the name of a neck."""
    made = {}

    def pair(name):
        if name not in made:
            folder, ours = tmp_path_factory.mktemp(name) / "exported", model_of(PROJECTION_CONFIGS[name])
            projection_export.save(ours, folder)
            made[name] = ours, opened(folder)
        return made[name]

    return pair


def opened(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def some_ids(texts=2, tokens=24, seed=0):
    return torch.randint(1, 97, (texts, tokens), generator=torch.Generator().manual_seed(seed))


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def greedy(theirs, ids, **options):
    return theirs.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=PAD, **options)[:, ids.shape[1] :]


def padded(ids, lengths):
    """The last tokens of each text behind padding, and the mask."""
    shown = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~shown, PAD), shown.long()


@pytest.mark.parametrize("name", PROJECTION_CONFIGS)
@torch.no_grad()
def test_logits_and_greedy_text_are_ours(pairs, name):
    ours, theirs = pairs(name)
    ids = some_ids()
    assert_same(theirs(ids).logits, ours(ids))
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    for use_cache in (True, False):
        texts = greedy(theirs, ids, use_cache=use_cache)
        for text, prompt in zip(texts, ids, strict=True):
            assert text.tolist() == list(generate(ours, prompt.tolist(), max_new_tokens=16, temperature=0.0))


@pytest.mark.parametrize("name", PROJECTION_CONFIGS)
@torch.no_grad()
def test_pieces_with_a_cache_give_the_logits_of_the_whole(pairs, name):
    _, theirs = pairs(name)
    ids, cache, pieces = some_ids(), None, []
    for piece in ids.split([5, 1, 1, 17], dim=1):
        out = theirs(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    assert_same(torch.cat(pieces, dim=1), theirs(ids).logits)
    lazy = transformers.DynamicCache()  # does not know how many layers there are
    theirs(ids[:, :9], past_key_values=lazy)
    assert_same(theirs(ids[:, 9:], past_key_values=lazy).logits, theirs(ids).logits[:, 9:])


@pytest.mark.parametrize("name", ["keel-all", "learned-bare", "bottleneck-all"])
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(pairs, name):
    ours, theirs = pairs(name)
    lengths = (24, 9, 1)
    ids, mask = padded(some_ids(3), lengths)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = theirs(ids, attention_mask=mask, position_ids=positions).logits
    for use_cache in (True, False):
        texts = greedy(theirs, ids, attention_mask=mask, use_cache=use_cache)
        for row, length in enumerate(lengths):
            alone = ids[row : row + 1, 24 - length :]
            assert_same(logits[row, 24 - length :], ours(alone)[0])
            assert texts[row].tolist() == list(generate(ours, alone[0].tolist(), max_new_tokens=16, temperature=0.0))


@torch.no_grad()
def test_padding_on_the_right_and_a_mask_without_positions(pairs):
    ours, theirs = pairs("keel-all")
    ids, mask = padded(some_ids(2), (24, 9))
    turned = theirs(ids.flip(1), attention_mask=mask.flip(1)).logits
    assert_same(turned[1, :9], ours(ids.flip(1)[1:, :9])[0])
    # As in a Llama: rotary positions are relative, so where a text begins does not matter.
    assert_same(theirs(ids, attention_mask=mask).logits[1, 15:], ours(ids[1:, 15:])[0])


@torch.no_grad()
def test_two_texts_in_one_row_do_not_see_each_other(pairs):
    ours, theirs = pairs("keel-all")
    ids = some_ids(1)
    positions = torch.cat((torch.arange(10), torch.arange(14)))[None]
    logits = theirs(ids, position_ids=positions, use_cache=False).logits
    assert_same(logits[:, :10], ours(ids[:, :10]))
    assert_same(logits[:, 10:], ours(ids[:, 10:]))


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=["three beams", "two of four"]
)
def test_beams_take_their_tokens_with_them(pairs, options):
    _, theirs = pairs("keel-all")
    ids, mask = padded(some_ids(2), (24, 9))
    with_cache, without = (greedy(theirs, ids, attention_mask=mask, use_cache=use, **options) for use in (True, False))
    assert with_cache.tolist() == without.tolist()


def test_guesses_that_are_taken_back_leave_no_trace(pairs):
    _, theirs = pairs("keel-all")
    ids = some_ids(1)
    ids[:, 12:] = ids[:, :12]
    guessed = greedy(theirs, ids, prompt_lookup_num_tokens=3, eos_token_id=PAD)
    assert guessed.tolist() == greedy(theirs, ids, eos_token_id=PAD).tolist()


def test_it_learns_like_a_llama(pairs):
    ours, theirs = pairs("bottleneck-all")
    ids = some_ids()
    expected = torch.nn.functional.cross_entropy(ours(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss = theirs(ids, labels=ids).loss
    assert_same(loss.detach(), expected.detach())
    loss.backward()
    assert all(parameter.grad is not None for parameter in theirs.parameters())
    theirs.zero_grad()
    assert [state.shape[-1] for state in theirs(ids, output_hidden_states=True).hidden_states] == [32] * 5


def test_what_it_cannot_do_is_refused(pairs):
    _, theirs = pairs("keel-all")
    ids = some_ids()
    with pytest.raises(ValueError, match="give input_ids"):
        theirs(inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(ValueError, match="batch x tokens"):
        theirs(ids, attention_mask=torch.zeros(2, 1, 24, 24))
    with pytest.raises(NotImplementedError, match="resized"):
        theirs.resize_token_embeddings(128)
    with pytest.raises(ValueError, match="gradient checkpointing"):
        theirs.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="no static cache"):
        greedy(theirs, ids, cache_implementation="static")
    bare = pairs("keel-bare")[1](ids).past_key_values
    with pytest.raises(ValueError, match="begin with an empty one"):
        theirs(ids[:, :1], past_key_values=bare)


def test_saved_again_it_is_the_same(pairs, tmp_path):
    _, theirs = pairs("learned-all")
    theirs.save_pretrained(tmp_path)
    ids = some_ids()
    with torch.no_grad():
        assert torch.equal(opened(tmp_path)(ids).logits, theirs(ids).logits)


def test_other_tools_say_what_to_do(tmp_path):
    model = model_of(ALL)
    with pytest.raises(UserError, match="thinpipe export"):
        to_dense(model)
    with pytest.raises(TypeError, match=r"hf\.projection\.save"):
        weights.save(model, tmp_path / "plain")
    projection_export.save(model, tmp_path / "exported")
    with pytest.raises(UserError, match="an export of a model with a boundary projection"):
        weights.load_config(tmp_path / "exported")
    with pytest.raises(UserError, match="only a Llama"):
        projection_export.save(model_of(PROJECTION_CONFIGS["keel-bare"], "gpt2-tiny"), tmp_path / "gpt2")
    assert not (tmp_path / "gpt2").exists()


ALONE = """
import sys
sys.modules["thinpipe"] = None  # importing it is an error
import torch, transformers
from safetensors.torch import load_file
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
known = load_file(sys.argv[2])
with torch.no_grad():
    torch.testing.assert_close(model(known["ids"]).logits, known["logits"], rtol=1e-4, atol=1e-4)
assert not [name for name in sys.modules if name.startswith("thinpipe.")]
print(type(model).__name__)
"""

RUN = """
[model]
preset = "llama-tiny"
[boundary]
forward = "int8"
"""


def test_the_verb_writes_a_folder_that_works_where_thinpipe_is_not(tmp_path, capsys):
    from safetensors.torch import save_file

    model = model_of(ALL)
    layers = state_by_layer(dict(model.named_parameters()), model.space)
    CheckpointFolder(tmp_path / "run/checkpoints").save(new_manifest(model, run=RUN), layers)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    printed = capsys.readouterr().out
    assert f'AutoModelForCausalLM.from_pretrained("{tmp_path / "exported"}", trust_remote_code=True)' in printed
    assert "modeling_thinpipe.py" in printed
    assert "the export computes without the rounding of the run's boundaries" in printed
    card = (tmp_path / "exported/README.md").read_text()
    assert card.count('"THIS_FOLDER", trust_remote_code=True') == 2
    ids = some_ids()
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(ids)}, tmp_path / "known.safetensors")
    command = [sys.executable, "-I", "-c", ALONE, tmp_path / "exported", tmp_path / "known.safetensors"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ThinpipeForCausalLM"
