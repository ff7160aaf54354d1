"""The paper's literal form (arXiv 2506.01260): full-width matrices with rows in span(U), and what keeps them there.

Written to be obviously right, not fast: full-width W, explicit compress and decompress at every boundary, gradients
projected by U Uᵀ, row-wise second moments taken over D entries, a Grassmann step with the D x D matrix S. It shares
the blocks' reading half with the library and none of the subspace arithmetic, which is what it is there to check.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinpipe.models import Model, SubspaceConfig, build, materialise
from thinpipe.subspace import DenseStream, ResidualWriter, Subspace


@dataclass(frozen=True)
class Failure:
    """The two ways in which an implementation goes wrong without an error message."""

    ordinary_adamw: bool = False
    fixed_not_subtracted: bool = False


class LiteralModel:
    """Full-width twin of a factored model: W = U Z, T_S = C Uᵀ."""

    def __init__(self, factored: Model, failure: Failure | None = None) -> None:
        space = factored.space
        assert isinstance(space, Subspace)
        self.failure = failure or Failure()
        self.U = space.basis_DK.clone()
        ids = torch.arange(factored.config.vocab_size)
        self.T_fixed = space.tokens(ids, self.U.dtype)
        positions = torch.arange(factored.config.max_seq_len)
        self.P_fixed = (
            torch.zeros(len(positions), factored.config.dim, dtype=self.U.dtype)
            if space.positions is None
            else space.positions(positions, self.U.dtype)
        )
        dense_config = replace(factored.config, subspace=SubspaceConfig())
        self.dense = materialise(build(dense_config), seed=0, dtype=self.U.dtype, draw=False)
        self.confined: dict[str, int] = {}
        """Confined parameters and the axis along which they are D wide."""
        self._copy_weights(factored)
        self.last_segment_gradients: list[Tensor] = []

    @torch.no_grad()
    def _copy_weights(self, factored: Model) -> None:
        sources = dict(factored.named_parameters())
        for name, target in self.dense.named_parameters():
            source = sources[name]
            if source.shape == target.shape:
                target.copy_(source)
            elif name.startswith("first."):
                target.copy_(source @ self.U.T)
                self.confined[name] = 1
            else:
                target.copy_(self.U @ source)
                self.confined[name] = 0

    def forward(self, ids_BT: Tensor, *, cut: bool = True) -> Tensor:
        """`cut=False` lets the full-width stream pass: the same function exactly when all writers lie in span(U)."""
        base = self.T_fixed[ids_BT] + self.P_fixed[: ids_BT.shape[1]]
        x = self.dense.first(ids_BT) + base
        for index, segment in enumerate(self.dense.segments):
            if cut and index > 0:
                x = self.decompress(self.compress(x, base), base)
            if index == len(self.dense.segments) - 1 and torch.is_grad_enabled():
                x.register_hook(self.last_segment_gradients.append)
            stream = DenseStream(x)
            for block in segment.blocks.values():
                stream = block(stream)
            x = stream.state
        return self.dense.last(DenseStream(x))

    def compress(self, x: Tensor, base: Tensor) -> Tensor:
        return (x if self.failure.fixed_not_subtracted else x - base) @ self.U

    def decompress(self, message: Tensor, base: Tensor) -> Tensor:
        x = message @ self.U.T
        return x if self.failure.fixed_not_subtracted else x + base

    def project(self, tensor: Tensor, axis: int) -> Tensor:
        """P tensor, or tensor P, with P = U Uᵀ on the D-wide axis."""
        projector = self.U @ self.U.T
        return projector @ tensor if axis == 0 else tensor @ projector

    def drift(self) -> float:
        """Largest ‖W − W U Uᵀ‖ / ‖W‖ over the writers."""
        drifts = []
        for module_name, module in self.dense.named_modules():
            if isinstance(module, ResidualWriter) and f"{module_name}.weight" in self.confined:
                weight = module.weight.detach()
                drifts.append(float((weight - self.project(weight, 0)).norm() / weight.norm()))
        return max(drifts)


class LiteralAdamW:
    """AdamW written out. Confined parameters: projected gradient, and one second moment per row (mean over D)."""

    def __init__(self, model: LiteralModel, lr: float, weight_decay: float) -> None:
        self.model, self.lr, self.weight_decay = model, lr, weight_decay
        self.beta1, self.beta2, self.eps, self.steps = 0.9, 0.95, 1e-8, 0
        self.parameters = dict(model.dense.named_parameters())
        self.m = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.v: dict[str, Tensor | float] = dict.fromkeys(self.parameters, 0.0)

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            assert gradient is not None
            axis = self.model.confined.get(name)
            if axis is not None:
                gradient = self.model.project(gradient, axis)
            square = gradient**2
            if axis is not None and not self.model.failure.ordinary_adamw:
                square = square.mean(axis, keepdim=True)
            self.m[name] = self.beta1 * self.m[name] + (1 - self.beta1) * gradient
            self.v[name] = self.beta2 * self.v[name] + (1 - self.beta2) * square
            m_hat = self.m[name] / (1 - self.beta1**self.steps)
            v_hat = self.v[name] / (1 - self.beta2**self.steps)
            parameter *= 1 - self.lr * self.weight_decay
            parameter -= self.lr * m_hat / (v_hat.sqrt() + self.eps)
            parameter.grad = None

    @torch.no_grad()
    def grassmann_step(self, step_size: float) -> None:
        """U' = qf(U − η grad / tr S) with the full D x D matrix S; then W' = W U'U'ᵀ and m' = m U'U'ᵀ."""
        model, U = self.model, self.model.U
        gradients = [g.reshape(-1, g.shape[-1]) for g in model.last_segment_gradients]
        S = sum(g.T @ g for g in gradients)
        assert isinstance(S, Tensor)
        riemannian = (torch.eye(len(U), dtype=U.dtype) - U @ U.T) @ (-2 * S @ U)
        Q, R = torch.linalg.qr(U - step_size * riemannian / S.trace())
        model.U = Q * R.diagonal().sign()
        model.last_segment_gradients.clear()
        for name, axis in model.confined.items():
            self.parameters[name].copy_(model.project(self.parameters[name], axis))
            self.m[name] = model.project(self.m[name], axis)
