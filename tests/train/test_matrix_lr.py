"""optimizer.matrix_lr_factor: which parameters it scales the learning rate of."""

from dataclasses import replace

import pytest
import torch

from thinpipe.config.model import ProjectionConfig, SubspaceConfig
from thinpipe.config.run import OptimizerConfig
from thinpipe.core.errors import UserError
from thinpipe.data import Cursor
from thinpipe.training.engine import Engine
from thinpipe.training.trainer import Trainer


def test_the_factor_of_matrices_leaves_tables_and_norms(run_config):
    """A quarter of the rate: a quarter of the step of a matrix, which has no other part without weight decay."""
    projection = ProjectionConfig(width=4, token_prior_rank=4, embedding_rank=4)
    model = replace(run_config.model, subspace=SubspaceConfig(), projection=projection)
    moved = {}
    for factor in (None, 0.25):
        config = replace(run_config, model=model, optimizer=OptimizerConfig(weight_decay=0.0, matrix_lr_factor=factor))
        engine = Engine(config, config.model.resolve(64))
        before = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
        engine.step(0, Trainer(config).batch_loader.batch(Cursor()), 2.0**-7)
        moved[factor] = {name: parameter.detach() - before[name] for name, parameter in engine.parameters.items()}
    tables = {name for name in moved[None] if name.endswith(("rows.weight", "embed_tokens.weight"))}
    assert len(tables) == 3
    for name, whole in moved[None].items():
        share = 0.25 if whole.dim() > 1 and name not in tables else 1.0
        torch.testing.assert_close(moved[0.25][name], share * whole, atol=1e-6, rtol=1e-4, msg=name)


def test_a_factor_is_above_zero():
    with pytest.raises(UserError, match="matrix_lr_factor"):
        OptimizerConfig(matrix_lr_factor=0.0)
