"""Service managers of the three systems: where a service's file lies, and the commands that make it run.

Tried on none of them by us; what is tested are the files.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.swarm.service.definition import Service
from thinpipe.swarm.service.files import launchd_plist, systemd_unit, task_xml

Command = tuple[str, ...]
_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Manager:
    """Service manager with one service."""

    program: str
    """Its command line."""
    file: Path
    content: bytes
    install: Sequence[Command]
    also: Command | None = None
    """Command after `install` whose failure changes only when the service starts."""
    remove: Sequence[Command]
    status: Command
    starts: str
    """When it starts, in words."""
    starts_without_also: str = ""
    output: str
    """How to read what it prints."""


def manager_of(service: Service, system: str = sys.platform, home: Path | None = None) -> Manager:
    """`system`: as `sys.platform` names it."""
    home = home or Path.home()
    if system == "darwin":
        domain = f"gui/{os.getuid() if hasattr(os, 'getuid') else 0}"
        file = home / "Library" / "LaunchAgents" / f"{service.name}.plist"
        return Manager(
            program="launchctl",
            file=file,
            content=launchd_plist(service),
            install=[("launchctl", "bootstrap", domain, str(file))],
            remove=[("launchctl", "bootout", f"{domain}/{service.name}")],
            status=("launchctl", "print", f"{domain}/{service.name}"),
            starts="whenever you sign in on this Mac",
            output=str(service.log),
        )
    if system == "win32":
        file = service.log.with_name("service.xml")
        user = f"{os.environ.get('USERDOMAIN', '.')}\\{os.environ.get('USERNAME', '')}"
        task = ("/TN", service.name)
        return Manager(
            program="schtasks",
            file=file,
            content=task_xml(service, user),
            install=[("schtasks", "/Create", *task, "/XML", str(file), "/F"), ("schtasks", "/Run", *task)],
            remove=[("schtasks", "/End", *task), ("schtasks", "/Delete", *task, "/F")],
            status=("schtasks", "/Query", *task, "/FO", "LIST"),
            starts="whenever you sign in to Windows",
            output=str(service.log),
        )
    unit = f"{service.name}.service"
    user_units = ("systemctl", "--user")
    return Manager(
        program="systemctl",
        file=home / ".config" / "systemd" / "user" / unit,
        content=systemd_unit(service).encode(),
        install=[(*user_units, "daemon-reload"), (*user_units, "enable", "--now", unit)],
        also=("loginctl", "enable-linger"),
        remove=[(*user_units, "disable", "--now", unit)],
        status=(*user_units, "status", "--no-pager", "--lines", "5", unit),
        starts="with this machine",
        starts_without_also="whenever you sign in (with the machine after: sudo loginctl enable-linger $USER)",
        output=f"journalctl --user --unit {service.name}",
    )


def install(manager: Manager) -> str:
    """Writes the file and starts the service; returns what was done, in words. Raises UserError."""
    if shutil.which(manager.program) is None:
        raise UserError(
            f"there is no {manager.program} on this system, so no service was installed: have the command started by "
            "whatever starts programs here"
        )
    manager.file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(manager.file, manager.content, mode=0o600)
    for command in manager.install:
        _call(command, f"{manager.file} is written, and the service does not run")
    starts = manager.starts
    if manager.also is not None:
        try:
            _call(manager.also, "")
        except UserError:
            starts = manager.starts_without_also
    return f"installed and started; it starts {starts}, and again when it fails. Its output: {manager.output}"


def remove(manager: Manager) -> str:
    """Stops the service and deletes its file. Raises UserError."""
    if not manager.file.exists():
        return f"there is no service: {manager.file} does not exist"
    failures = []
    for command in manager.remove:
        try:
            _call(command, "the service may still run")
        except UserError as error:
            failures.append(str(error))
    manager.file.unlink()
    return "\n".join((*failures, f"removed: {manager.file}"))


def status(manager: Manager) -> str:
    if not manager.file.exists():
        return "there is no service for this folder: `thinpipe service install` makes one"
    done = _run(manager.status)
    said = (done.stdout + done.stderr).strip()
    return f"{manager.file}\n{said}\nits output: {manager.output}"


def _call(command: Command, consequence: str) -> None:
    done = _run(command)
    if done.returncode:
        why = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise UserError(f"{consequence}: `{' '.join(command)}` failed ({why})")


def _run(command: Command) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
