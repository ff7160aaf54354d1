"""What a run can choose, read from the registries and the types of the settings: encodings of boundaries, models, how
they are trained. A new boundary method, number format, compressor, feedback, model family, kind of projection or value
of a setting is among them without a line here.

Left out: `training.precision = "fp64"`, which some devices do not have; `execution.compile`, which makes code for CPUs
and GPUs only.
"""

from contextlib import suppress
from dataclasses import fields
from typing import Literal, get_args, get_origin

from tests.pairs import cover, rows_of
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.registry import COMPRESSORS, FEEDBACKS, FORMAT_COMPRESSORS
from thinpipe.config.boundary import COMPRESSION_SETTINGS, BoundaryConfig, CompressionConfig
from thinpipe.config.families import FAMILIES
from thinpipe.config.model import ExecutionConfig, ProjectionConfig, SubspaceConfig
from thinpipe.config.run import ModelSettings, OptimizerConfig, TrainingConfig
from thinpipe.core.errors import UserError
from thinpipe.subspace.fixed_tables import FIXED_TABLES

WIDTH = 6
"""Numbers per token that cross a boundary of a model with a subspace or projections."""
NUMBERS = {"keep": 0.3, "bits": 4, "tile": 8, "rank": 2, "whole_channels": 3, "whole_tokens": 2}
"""Values of the settings of compressors that are numbers: a new setting needs one."""


def values_of(config, name):
    """Values that the type of a setting allows; for a number, the one of NUMBERS."""
    (hint,) = (field.type for field in fields(config) if field.name == name)
    literals = [value for part in (hint, *get_args(hint)) if get_origin(part) is Literal for value in get_args(part)]
    return literals or ([True] if hint is bool else [NUMBERS[name]])


def compressions():
    """Settings of every compressor with every feedback."""
    return [
        {"kind": kind, COMPRESSION_SETTINGS[kind][0]: NUMBERS[COMPRESSION_SETTINGS[kind][0]], "feedback": feedback}
        for kind in COMPRESSORS
        for feedback in FEEDBACKS
    ]


def codecs():
    """Names and settings for `thinpipe.codec`: number formats, compressors with feedback, then with every value of
    every other setting. A mask that is reused and AQ-SGD need more than a codec: both are in `boundaries`."""
    settings = [chosen for chosen in compressions() if chosen["feedback"] != "aqsgd"]
    for kind in COMPRESSORS:
        required, *others = COMPRESSION_SETTINGS[kind]
        for name in (name for name in others if name != "reuse_mask"):
            settings += [{"kind": kind, required: NUMBERS[required], name: value} for value in _values(name)]
    return [*((name, {}) for name in FORMATS), *((chosen.pop("kind"), chosen) for chosen in settings)]


def _values(name):
    return values_of(CompressionConfig, name)


def boundaries():
    """Every method with every encoding of states and every encoding of gradients. The directions are codecs of their
    own, so not each encoding of states meets each of gradients."""
    encodings = [
        *({"format": number_format} for number_format in FORMATS),
        *compressions(),
        {"kind": "topk", "reuse_mask": True},
    ]
    rows = rows_of({"method": [*FORMAT_COMPRESSORS], "states": encodings, "gradients": encodings}, _can_be_combined)
    chosen = cover(rows, lambda row: {(row["method"], way, str(row[way])) for way in ("states", "gradients")})
    return [boundary_of(**row) for row in chosen]


def _can_be_combined(**row):
    with suppress(UserError):
        return bool(boundary_of(**row))
    return False


def boundary_of(states, gradients, method=None):
    """Raises UserError for what cannot be combined."""
    (forward, states), (backward, gradients) = map(_direction, (states, gradients))
    return BoundaryConfig(method=method, forward=forward, backward=backward, states=states, gradients=gradients)


def _direction(encoding):
    number_format = "fp32" if "kind" in encoding else encoding["format"]
    return number_format, CompressionConfig(**(encoding if "kind" in encoding else {}))


TABLES = [fixed for fixed in FIXED_TABLES if fixed != "given"]
"""Frozen tables of subspace models that are trained from their first step on; a given one comes with weights."""
MODELS = {
    "dense": {},
    **{f"subspace-{fixed}": {"subspace": SubspaceConfig(width=WIDTH, fixed=fixed)} for fixed in TABLES},
    **{
        kind: {"projection": ProjectionConfig(kind=kind, width=WIDTH, token_prior_rank=4, token_prior_window=2)}
        for kind in values_of(ProjectionConfig, "kind")
    },
}
"""Kinds of model, as sections of the settings."""


def model_settings(family, model="dense"):
    """Smallest preset of a family, in two segments, with dropout if the family has it."""
    presets = FAMILIES[family].presets()
    smallest = min(presets, key=lambda name: presets[name].dim * presets[name].n_layers)
    dropout = 0.1 if hasattr(presets[smallest], "dropout") else None
    return ModelSettings(preset=smallest, n_layers=2, boundaries=(1,), dropout=dropout, **MODELS[model])


def _executions():
    """(setting, value) for every value that is not the default."""
    for field in (field for field in fields(ExecutionConfig) if field.name != "compile"):
        yield from ((field.name, value) for value in values_of(ExecutionConfig, field.name) if value != field.default)


def trainings():
    """Families, kinds of model, optimisers, precisions, places of the optimiser's state and ways to execute: rows in
    which every two of them meet."""
    axes = {
        "family": [*FAMILIES],
        "model": [*MODELS],
        "second_moment": values_of(OptimizerConfig, "second_moment"),
        "precision": [name for name in values_of(TrainingConfig, "precision") if name not in ("auto", "fp64")],
        "offload": values_of(TrainingConfig, "offload"),
        "execution": ["plain", *_executions()],
    }

    def allowed(model, second_moment, **_row):
        """The optimiser's choice is for subspaces."""
        return second_moment == OptimizerConfig.second_moment or model.startswith("subspace")

    return cover(rows_of(axes, allowed))
