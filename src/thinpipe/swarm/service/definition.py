"""What a service runs: the command of a hub or of a joined machine, read from its folder."""

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thinpipe.config.hub import HubConfig, JoinConfig, ServiceConfig
from thinpipe.config.toml import load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.foreign import sanitize
from thinpipe.core.run_folder import hub_start_path
from thinpipe.swarm.peer.identity import load_identity

RESTART_SECONDS = 30
"""Pause before a program that has failed is started again."""
STOP_SECONDS = 300
"""Time in which a program that is asked to stop may save."""
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTHONPATH")
"""Environment variables that a service keeps, because numbers, speed or files depend on them."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A program that starts with the machine or with its user's session, and again when it fails: at any exit code but
    0, with which a run has ended."""

    name: str
    """Name for the system's service manager: letters, digits and hyphens."""
    title: str
    command: tuple[str, ...]
    folder: Path
    """Folder in which the command runs."""
    log: Path
    """File for its output, on systems that keep none themselves."""
    environment: Mapping[str, str] = field(default_factory=dict)


def service_of(config: ServiceConfig) -> Service:
    """Raises UserError if the folder is neither that of a hub's run nor that of a joined machine."""
    folder = config.folder.absolute()
    if hub_start_path(folder).is_file():
        return _of_hub(config, folder)
    identity = load_identity(folder)
    if identity is None:
        raise UserError(
            f"{config.folder} is neither the dump_folder of a hub that was started once, nor a folder made by "
            "`thinpipe join`: start `thinpipe hub`, or join with the invite, once by hand"
        )
    join = JoinConfig(
        invite=str(folder), device=config.device, memory=config.memory, base=config.base, address=config.address
    )
    return Service(
        name=_name(f"join-{identity.run}-{identity.name}", folder),
        title=sanitize(f"thinpipe: {identity.name} in run {identity.run}"),  # the hub's words, in a file of this system
        command=_python("join", *join.arguments(str(folder), config.device, 0)),
        folder=Path.cwd(),
        log=folder / "service.log",
        environment=_environment(),
    )


def _of_hub(config: ServiceConfig, folder: Path) -> Service:
    if config.lends_something:
        raise UserError(f"{config.folder} is a hub's: --device, --memory, --base and --address are for joined machines")
    start = hub_start_path(folder)
    dump_folder = load_toml(start, HubConfig).job.dump_folder
    if dump_folder.absolute().resolve() != folder.resolve():
        raise UserError(
            f"the hub was started in another folder, from which {dump_folder} leads to {folder}: go there, and install "
            "the service again"
        )
    return Service(
        name=_name(f"hub-{folder.name}", folder),
        title=sanitize(f"thinpipe: hub of run {folder.name}"),
        command=_python("hub", str(start)),
        folder=Path.cwd(),
        log=folder / "hub" / "service.log",
        environment=_environment(),
    )


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "thinpipe", *arguments)


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}


def _name(words: str, folder: Path) -> str:
    """The same for the same folder, and no other's."""
    plain = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:60]
    return f"thinpipe-{plain}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:6]}"
