"""Looks at this machine: Python, torch and its devices, extras, processor. Imports torch only to look at it."""

import os
import platform
from collections.abc import Iterable
from importlib.util import find_spec

from thinpipe.core.errors import UserError
from thinpipe.core.extras import how_to_install
from thinpipe.core.numerics import KNOWN_TORCH
from thinpipe.core.units import format_bytes
from thinpipe.swarm.server import find_server
from thinpipe.train.finding import Finding, not_checked, ok, problem, warning

_EXTRAS = {
    "report": ("matplotlib",),
    "swarm": ("nats", "nkeys", "cryptography"),
    "hf": ("transformers", "datasets"),
    "parquet": ("pyarrow",),
    "dashboard": ("starlette", "uvicorn"),
    "prometheus": ("prometheus_client",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
"""What each one brings; see pyproject.toml."""


def machine_findings(*, swarm: bool, host: bool, device: str) -> list[Finding]:
    """`swarm`: a hub is to be dialled; `host`: or started."""
    return [_python(), _torch(), _devices(device), _threads(), _extras(needed=swarm or host), *_server(host)]


def missing_extras(names: Iterable[str]) -> list[str]:
    return [name for name in names if not all(map(find_spec, _EXTRAS[name]))]


def _python() -> Finding:
    """An older one than is asked for would not have come so far."""
    return ok("python", f"{platform.python_version()} on {platform.system()}")


def _torch() -> Finding:
    try:
        import torch
    except Exception as error:  # a broken installation raises all kinds
        return problem("torch", f"cannot be imported: {error}", f'Install it: pip install "torch=={KNOWN_TORCH}*".')
    found = str(torch.__version__)
    if not found.startswith(KNOWN_TORCH):
        return problem(
            "torch", f"{found}, and thinpipe knows {KNOWN_TORCH}x", f'Run pip install "torch=={KNOWN_TORCH}*".'
        )
    return ok("torch", found)


def _devices(wanted: str) -> Finding:
    try:
        import torch
    except Exception:
        return not_checked("devices", "torch is not there to ask")
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append(f"cuda:{index} {name}, {format_bytes(free)} of {format_bytes(total)} free")
    if torch.backends.mps.is_available():
        found.append("mps (thinpipe uses the processor there)")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        return problem(
            "devices",
            "torch sees no CUDA device",
            "Install the CUDA build of torch and its driver (pytorch.org/get-started), or leave --device out.",
        )
    return ok("devices", "; ".join(found) or "no GPU: the processor computes")


def _threads() -> Finding:
    try:
        import torch
    except Exception:
        return not_checked("threads", "torch is not there to ask")
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    text = f"{threads} of {cores} cores"
    if threads > cores:
        return warning("threads", text, f"Set OMP_NUM_THREADS to {cores} or less.")
    return ok("threads", text)


def _extras(*, needed: bool) -> Finding:
    missing = missing_extras(_EXTRAS)
    there = [name for name in _EXTRAS if name not in missing]
    text = f"installed: {', '.join(there) or 'none'}; not: {', '.join(missing) or 'none'}"
    if needed and "swarm" in missing:
        return problem("extras", text, f"A hub needs the extra swarm: {how_to_install('swarm')}.")
    return ok("extras", text, f"If you want them: {how_to_install(','.join(missing))}." if missing else "")


def _server(host: bool) -> list[Finding]:
    if not host:
        return []
    try:
        return [ok("nats-server", str(find_server()))]
    except UserError as error:
        return [problem("nats-server", "not found", f"{str(error)[0].upper()}{str(error)[1:]}.")]
