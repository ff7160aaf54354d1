"""Losses from chunks of the vocabulary: those of all logits, with few logits at a time."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from thinpipe.config import model_family
from thinpipe.config.model_family import vocabulary_chunk
from thinpipe.models import ExecutionConfig, LlamaConfig, build, materialise
from thinpipe.models.token_losses import token_losses

TOKENS, DIM, VOCABULARY = 2 * 48, 8, 1000
RECIPES = {
    "fp64": (torch.float64, False),
    "fp32": (torch.float32, False),
    "bf16-mixed": (torch.float32, True),
    "bf16": (torch.bfloat16, False),
}
LLAMA = LlamaConfig(
    vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=48, boundaries=(1,)
)


def drawn(dtype=torch.float64):
    """States, head and targets: the same numbers in every precision, which bfloat16 has too."""
    generator = torch.Generator().manual_seed(1)
    states, head = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((2, 48, DIM), (VOCABULARY, DIM)))
    targets = torch.randint(VOCABULARY, (2, 48), generator=generator)
    return states.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), targets


def of_all_logits(states, head, targets):
    logits = F.linear(states, head).flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets.flatten(), reduction="none")


def computed(losses_of, dtype=torch.float64, autocast=False):
    """Losses, and gradients of states and head when losses weigh unequally."""
    states, head, targets = drawn(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = losses_of(states, head, targets)
    (losses * torch.linspace(0, 1, TOKENS, dtype=losses.dtype)).sum().backward()
    return losses.detach(), states.grad, head.grad


@pytest.fixture
def few_logits(monkeypatch):
    """Eight chunks of the vocabulary, the last of which is shorter."""
    monkeypatch.setattr(model_family, "MAX_LOGITS", TOKENS * 140)
    assert vocabulary_chunk(TOKENS, VOCABULARY) == 136
    return TOKENS * 136


@pytest.mark.parametrize(("dtype", "autocast"), RECIPES.values(), ids=RECIPES)
def test_few_logits_are_computed_at_once_and_bit_for_bit(dtype, autocast):
    for all_logits, ours in zip(*(computed(f, dtype, autocast) for f in (of_all_logits, token_losses)), strict=True):
        assert torch.equal(all_logits, ours)


@pytest.mark.usefixtures("few_logits")
@pytest.mark.parametrize(("dtype", "autocast"), RECIPES.values(), ids=RECIPES)
def test_chunks_are_as_exact_as_all_logits(dtype, autocast):
    exact = computed(of_all_logits)
    for all_logits, chunked, right in zip(
        computed(of_all_logits, dtype, autocast), computed(token_losses, dtype, autocast), exact, strict=True
    ):
        assert chunked.dtype == all_logits.dtype
        error, ours = ((found.double() - right).norm() / right.norm() for found in (all_logits, chunked))
        assert ours < max(2.5 * error, 1e-14)


class LargestResult(TorchDispatchMode):
    """Largest number of elements of a result of any operator but views."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.numel = max(self.numel, result.numel())
        return result


def test_no_more_logits_exist_than_those_of_a_chunk(few_logits):
    with LargestResult() as largest:
        computed(token_losses)
    assert VOCABULARY * DIM < few_logits == largest.numel


@pytest.mark.usefixtures("few_logits")
@pytest.mark.parametrize("target", [-1, VOCABULARY])
def test_a_target_that_is_no_token_gives_no_number(target):
    states, head, targets = drawn()
    targets[1, 3] = target
    assert token_losses(states, head, targets).isnan().nonzero().tolist() == [[48 + 3]]


@pytest.mark.usefixtures("few_logits")
def test_gradients_of_states_and_head_can_be_asked_for_one_after_the_other():
    """As schedules do that split the backward pass."""
    states, head, targets = drawn()
    loss = token_losses(states, head, targets).mean()
    parts = [torch.autograd.grad(loss, wanted, retain_graph=True)[0] for wanted in (states, head)]
    together = torch.autograd.grad(loss, (states, head))
    assert all(torch.equal(part, both) for part, both in zip(parts, together, strict=True))


def gradients_of(model, ids_BW):
    model(ids_BW[:, :-1], targets_BT=ids_BW[:, 1:]).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def check_a_model(monkeypatch, few_logits, **execution):
    """Compares the gradients of a model whose loss is computed in chunks with those of all logits and no options."""
    ids_BW = torch.randint(VOCABULARY, (2, 49), generator=torch.Generator().manual_seed(2))
    models = [materialise(build(LLAMA), seed=1, dtype=torch.float64) for _ in range(2)]
    models[0].set_execution(ExecutionConfig(**execution))
    chunked = gradients_of(models[0], ids_BW)
    monkeypatch.setattr(model_family, "MAX_LOGITS", few_logits * 100)
    whole = gradients_of(models[1], ids_BW)
    assert 0 < (chunked - whole).norm() / whole.norm() < 1e-12


@pytest.mark.parametrize("checkpointing", ["none", "block", "segment"])
def test_a_model_learns_from_chunks_what_it_learns_from_all_logits(checkpointing, few_logits, monkeypatch):
    check_a_model(monkeypatch, few_logits, checkpoint_activations=checkpointing)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own insides
@pytest.mark.parametrize("checkpointing", ["none", "block", "segment"])
def test_and_with_compiled_blocks(checkpointing, few_logits, monkeypatch):
    check_a_model(monkeypatch, few_logits, checkpoint_activations=checkpointing, compile=True)
