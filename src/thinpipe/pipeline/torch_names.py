"""Names of torch's pipelining that `pipeline/stage.py` relies on, and the check that the installed torch has them.

Most of them are undocumented, and torch changes such names between minor versions: 2.14 has a `fwd_cache`, 2.15 has
none. What counts is therefore not the version but that torch's code still uses each name: a name that is only assigned
or overridden here, and no longer read or called there, would change nothing without an error.
"""

import logging
from collections.abc import Iterator
from inspect import isclass, isfunction
from types import CodeType

import torch
from torch.distributed.pipelining import schedules, stage

from thinpipe.core.errors import UserError
from thinpipe.core.numerics import INSTALL_TORCH, TESTED_TORCH, is_tested_torch

_LOG = logging.getLogger(__name__)

NAMES = {
    # Attributes of a stage, and of a receive slot: where torch looks for what has been received.
    *("args_recv_info", "grad_recv_info", "buffer"),
    *("group", "group_rank", "device", "stage_index", "num_stages", "is_first", "is_last", "has_backward"),
    *("stage_index_to_group_rank", "_runtime_validate"),
    # Methods of a stage that a schedule calls.
    *("_prepare_forward_infra", "clear_runtime_states", "forward_one_chunk", "backward_one_chunk"),
    *("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"),
    *("set_local_fwd_input", "get_local_bwd_output", "set_local_bwd_input"),
    # Methods of a stage that exchange pickled metadata.
    *("_send_meta", "_recv_meta"),
    # The number of warm-up forward passes of 1F1B.
    "_num_stages",
}
_AGREEMENTS = ({"_warmup_forward_vote", "_warmup_backward_result"}, {"_initialize_pipeline_distributed_state"})
"""Known ways in which stages agree on static shapes, of torch up to 2.14 and from 2.15: one must be there whole."""


def missing_names() -> list[str]:
    """Names that the pipeline relies on and that the code of the installed torch does not use, sorted."""
    known = [value for module in (stage, schedules) for value in vars(module).values() if isclass(value)]
    classes = [cls for cls in known if cls.__module__.startswith("torch.distributed.pipelining.")]
    methods = [method for cls in classes for method in vars(cls).values() if isfunction(method)]
    used = {name for method in methods for name in _names_in(method.__code__)}
    unknown_agreement = all(agreement - used for agreement in _AGREEMENTS)
    return sorted((NAMES | _AGREEMENTS[-1] if unknown_agreement else NAMES) - used)


def check_torch() -> None:
    """Raises UserError if the installed torch lacks a name; logs a warning if its minor version was never tested."""
    if missing := missing_names():
        raise UserError(
            f"torch {torch.__version__} does not use {', '.join(missing)} in torch.distributed.pipelining any more, on "
            f"which the pipeline relies: {INSTALL_TORCH}"
        )
    if not is_tested_torch(torch.__version__):
        _LOG.warning(
            "torch %s has not been tested with thinpipe, %s have: `thinpipe doctor` checks what it can",
            torch.__version__,
            ", ".join(TESTED_TORCH),
        )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:  # functions within
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
