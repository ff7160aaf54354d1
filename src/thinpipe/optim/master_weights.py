"""float32 master weights in host memory, and bfloat16 copies of them on the device, for matrix products under autocast.

A product under autocast reads its float32 weight as bfloat16, and the weight's bfloat16 gradients are added up in
float32. A bfloat16 parameter with a float32 gradient (torch's `grad_dtype`) gives the same bits, with 6 bytes a weight
on the device instead of 8 and no further copy by autocast. Only the update needs the master, and streams it through
the device together with the moments (`parameter_parts`).
"""

import torch
from torch import Tensor, nn

from thinpipe.device.host_copies import has_pinned_memory, pinned
from thinpipe.subspace.parameter_tags import coordinates_of


def keep_masters_on_host(module: nn.Module) -> None:
    """Replaces the float32 weights of linear layers in place, without effect on a device that computes in host memory.
    Coordinates stay as they are: a change of basis needs them on the device; so does a module with frozen weights, of
    which only small adapters are updated."""
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return
    for layer in module.modules():
        if not isinstance(layer, nn.Linear) or coordinates_of(layer.weight) is not None:
            continue
        weight = layer.weight.detach()
        if has_pinned_memory(weight.device):
            layer.weight = nn.Parameter(weight.bfloat16())
            layer.weight.grad_dtype = weight.dtype
            layer.weight.thinpipe_master = pinned(weight)  # type: ignore[attr-defined]


def master_of(parameter: Tensor) -> Tensor | None:
    """The master of a parameter whose numbers on the device are a copy; None for an ordinary parameter."""
    return getattr(parameter, "thinpipe_master", None)


def weights_of(parameter: Tensor) -> Tensor:
    """The numbers of a parameter that are trained and saved: its master, or itself."""
    master = master_of(parameter)
    return parameter.detach() if master is None else master


@torch.no_grad()
def set_weights(parameter: Tensor, values: Tensor) -> None:
    """Gives a parameter, and its master, these numbers."""
    weights_of(parameter).copy_(values)
    if master_of(parameter) is not None:
        parameter.copy_(values)
