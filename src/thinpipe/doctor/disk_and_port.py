"""Checks of the disk for checkpoints and of a hub's port. Imports no torch, so that they can be made before a start."""

import errno
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from thinpipe.config.hub import HubConfig
from thinpipe.config.run import RunConfig
from thinpipe.core.run_folder import checkpoints_path
from thinpipe.core.units import format_bytes
from thinpipe.doctor.finding import Finding, not_checked, ok, problem
from thinpipe.planning.segment_costs import segment_costs, shared_nbytes
from thinpipe.planning.stored_model import PlannedModel


def disk_finding(config: RunConfig, model: PlannedModel | None) -> Finding:
    folder = config.job.dump_folder
    place = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return problem(
            "disk", f"{place} cannot be written: {error.strerror}", "Set job.dump_folder to a writable folder."
        )
    free = shutil.disk_usage(place).free
    if model is None:
        return not_checked("disk", f"{format_bytes(free)} free in {place}; the size of a checkpoint is not known")
    one = sum(cost.state_nbytes for cost in segment_costs(model, config)) + shared_nbytes(model, config)
    wanted = max(one, checkpoints_nbytes(config, one) - _held(checkpoints_path(folder)))
    text = f"{format_bytes(free)} free in {place}; checkpoints of {format_bytes(one)} need {format_bytes(wanted)} more"
    if free < wanted:
        return problem(
            "disk", text, "Free disk space, set job.dump_folder to another disk, or lower checkpoint.keep_latest_k."
        )
    return ok("disk", text)


def checkpoints_nbytes(config: RunConfig, one: int) -> int:
    """Peak bytes of all checkpoints kept: a new one is complete before the oldest is deleted. `one`: bytes of one."""
    n_kept = config.checkpoint.keep_latest_k
    return one * (n_kept + 1 if n_kept else -(-config.training.steps // config.checkpoint.steps))


def _held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def port_finding(config: HubConfig) -> Finding:
    """Whether a hub could listen on its port. Reachability must be tested from outside: `thinpipe doctor --hub`."""
    hub_settings = config.hub
    family = socket.AF_INET6 if ":" in hub_settings.host else socket.AF_INET
    where = f"{hub_settings.host}:{hub_settings.port}" if hub_settings.port else f"{hub_settings.host}, any port"
    try:
        with socket.socket(family) as probe:
            if sys.platform == "win32":  # where SO_REUSEADDR would let this socket share a port that is in use
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
            else:  # a port whose last connections are closing is free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((hub_settings.host, hub_settings.port))
    except OSError as error:
        return problem(
            "port",
            f"{where}: {error.strerror}",
            "Stop the program that listens there, or choose another port with --hub.port."
            if error.errno == errno.EADDRINUSE
            else "This machine has no such address: leave out --hub.host.",
        )
    text = (
        f"{where} is free; behind a router, forward the port, then run `thinpipe doctor --hub ADDRESS:PORT` elsewhere"
    )
    return ok("port", text)
