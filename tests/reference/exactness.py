"""How exact the subspace form is. Tests hold these figures to limits; `benchmarks/exactness.py` prints them."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference.language import SyntheticLanguage
from tests.reference.literal import Failure, LiteralAdamW, LiteralModel
from thinpipe.models import GPT2Config, LlamaConfig, Model, ModelConfig, SubspaceConfig, build, materialise
from thinpipe.optim import RowwiseAdamW
from thinpipe.subspace import Basis, GrassmannTracker, SignTable, SubspaceStream, rebase_squares

VOCABULARY, BATCH, TOKENS = 256, 8, 32
LANGUAGE = SyntheticLanguage(VOCABULARY, seed=5)
LEARNING_RATE = 1e-3
"""Three times this rate makes training chaotic: rounding then grows tenfold every 12 steps, in any two programs."""


def small_config(family: str, *, free_last: bool, boundaries: tuple[int, ...] = (1, 2, 3)) -> ModelConfig:
    subspace = SubspaceConfig(width=4, free_last=free_last, seed=3)
    if family == "gpt2":
        return GPT2Config(
            vocab_size=VOCABULARY,
            dim=64,
            n_layers=4,
            n_heads=4,
            max_seq_len=TOKENS,
            boundaries=boundaries,
            subspace=subspace,
        )
    return LlamaConfig(
        vocab_size=VOCABULARY,
        dim=64,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=176,
        max_seq_len=TOKENS,
        boundaries=boundaries,
        subspace=subspace,
    )


def loss_of(logits_BTV: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), ids[:, 1:].flatten())


def round_trip(dim: int, width: int, dtype: torch.dtype) -> float:
    """Largest error of X -> (X − T_fixed[t]) U -> · Uᵀ + T_fixed[t], relative to the largest |X|."""
    basis = Basis.random(dim, width, seed=1, dtype=dtype)
    table = SignTable(500, dim, std=0.02, seed=1)
    generator = torch.Generator().manual_seed(2)
    ids_BT = torch.randint(500, (2, 64), generator=generator)
    coords_BTK = torch.randn(2, 64, width, generator=generator, dtype=dtype)
    base_BTD = table(ids_BT, dtype)
    sent_BTD = SubspaceStream(coords_BTK, base_BTD, basis.matrix_DK).dense()
    message_BTK = (sent_BTD - base_BTD) @ basis.matrix_DK
    received_BTD = SubspaceStream(message_BTK, base_BTD, basis.matrix_DK).dense()
    return float((received_BTD - sent_BTD).abs().max() / sent_BTD.abs().max())


@dataclass
class Trajectory:
    """Losses of both forms, step by step, and of each after every Grassmann update."""

    factored: list[float] = field(default_factory=list)
    literal: list[float] = field(default_factory=list)

    @property
    def largest_difference(self) -> float:
        return max(abs(a - b) for a, b in zip(self.factored, self.literal, strict=True))


def change_basis(model: Model, optimizer: RowwiseAdamW, old: Basis, new: Basis) -> float:
    """Maps the model and its moments to the new basis; returns ‖Z'‖/‖Z‖."""
    squares = rebase_squares(dict(model.named_parameters()), optimizer, old, new).values()
    model.space.basis = new
    return (sum(after for _, after in squares) / sum(before for before, _ in squares)) ** 0.5


def trajectory(family: str, *, free_last: bool, steps: int = 200, interval: int = 80) -> Trajectory:
    """Trains the factored model with the library and the literal one by the book, in float64, on the same data."""
    model = materialise(build(small_config(family, free_last=free_last)), seed=11, dtype=torch.float64)
    literal = LiteralModel(model)
    optimizer = RowwiseAdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    literal_optimizer = LiteralAdamW(literal, lr=LEARNING_RATE, weight_decay=0.01)
    tracker = GrassmannTracker(model.space.basis, step_size=1.0)
    model.segments[-1].on_gradient = tracker.observe
    losses = Trajectory()
    for step in range(1, steps + 1):
        ids = LANGUAGE.batch(step, BATCH, TOKENS)
        loss, literal_loss = loss_of(model(ids[:, :-1]), ids), loss_of(literal.forward(ids[:, :-1]), ids)
        losses.factored.append(loss.item())
        losses.literal.append(literal_loss.item())
        optimizer.zero_grad()
        loss.backward()
        literal_loss.backward()
        optimizer.step()
        literal_optimizer.step()
        if step % interval == 0:
            tracker.update(lambda old, new: change_basis(model, optimizer, old, new))
            literal_optimizer.grassmann_step(step_size=1.0)
    assert model.space.version == steps // interval
    return losses


@dataclass
class LiteralRun:
    losses: list[float] = field(default_factory=list)
    uncut_losses: dict[int, float] = field(default_factory=dict)
    """By step: the loss of the same weights when the stream passes the boundaries untouched."""
    drift: float = 0.0


def train_literal(dtype: torch.dtype, *, steps: int = 1000, failure: Failure | None = None) -> LiteralRun:
    """The literal form alone, never re-projected: does it stay in span(U), and what does the loss say?"""
    literal = LiteralModel(materialise(build(small_config("llama", free_last=False)), seed=11, dtype=dtype), failure)
    optimizer = LiteralAdamW(literal, lr=LEARNING_RATE, weight_decay=0.01)
    run = LiteralRun()
    for step in range(steps):
        ids = LANGUAGE.batch(step, BATCH, TOKENS)
        loss = loss_of(literal.forward(ids[:, :-1]), ids)
        run.losses.append(loss.item())
        if step % 25 == 0 or step == steps - 1:
            with torch.no_grad():
                run.uncut_losses[step] = loss_of(literal.forward(ids[:, :-1], cut=False), ids).item()
        loss.backward()
        literal.last_segment_gradients.clear()
        optimizer.step()
    run.drift = literal.drift()
    return run


def gradients_by_hand(model: Model, ids: Tensor) -> dict[str, Tensor]:
    """As processes would: every segment alone, only `state` and its gradient crossing a boundary."""
    sent: list[Tensor] = []
    received: list[Tensor] = []
    state: Tensor | None = None
    for segment in model.segments:
        if sent:
            state = sent[-1].detach().requires_grad_()
            received.append(state)
        sent.append(segment(ids[:, :-1], state))
    loss_of(sent[-1], ids).backward()
    for out, arrived in zip(reversed(sent[:-1]), reversed(received), strict=True):
        assert arrived.grad is not None
        out.backward(arrived.grad)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def backward_error(family: str, *, free_last: bool) -> float:
    """Largest relative difference between gradients of the cut model and of the uncut one, over all parameters."""
    cut = materialise(build(small_config(family, free_last=free_last)), seed=11, dtype=torch.float64)
    ids = LANGUAGE.batch(1, BATCH, TOKENS)
    by_hand = gradients_by_hand(cut, ids)
    # With a free last segment the last boundary is part of the model, so the reference keeps that one alone and lets
    # autograd pass through it; without, the reference has no boundary at all.
    config = small_config(family, free_last=free_last, boundaries=(3,) if free_last else ())
    uncut = materialise(build(config), seed=11, dtype=torch.float64)
    loss_of(uncut(ids[:, :-1]), ids).backward()
    uncut_gradients = {name: p.grad for name, p in uncut.named_parameters() if p.grad is not None}
    assert by_hand.keys() == uncut_gradients.keys() == dict(cut.named_parameters()).keys()
    return max(
        float((by_hand[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in uncut_gradients.items()
    )
