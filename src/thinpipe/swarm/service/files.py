"""Texts of service files: a systemd user unit, a launchd agent, a task of the Windows Task Scheduler. Pure: writes
nothing."""

import plistlib
from xml.etree import ElementTree

from thinpipe.swarm.service.definition import RESTART_SECONDS, STOP_SECONDS, Service

_CONTINUES = "\\"
"""At the end of a line of a unit, it makes the next line a part of it."""
_TASK = "http://schemas.microsoft.com/windows/2004/02/mit/task"


def systemd_unit(service: Service) -> str:
    """Exit code 0 is not followed by a new start, nor is `systemctl stop`."""
    variables = [f"Environment={_systemd_word(f'{name}={value}')}" for name, value in service.environment.items()]
    return "\n".join(
        (
            "[Unit]",
            f"Description={service.title.replace('%', '%%').rstrip(_CONTINUES)}",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            f"WorkingDirectory={str(service.folder).replace('%', '%%')}",
            *variables,
            f"ExecStart={' '.join(_systemd_word(word.replace('$', '$$')) for word in service.command)}",
            "Restart=on-failure",
            f"RestartSec={RESTART_SECONDS}",
            "# A stop reaches the program alone, which saves before it ends what it has started.",
            "KillMode=mixed",
            f"TimeoutStopSec={STOP_SECONDS}",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        )
    )


def _systemd_word(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def launchd_plist(service: Service) -> bytes:
    return plistlib.dumps(
        {
            "Label": service.name,
            "ProgramArguments": list(service.command),
            "WorkingDirectory": str(service.folder),
            "EnvironmentVariables": dict(service.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_SECONDS,
            "ExitTimeOut": STOP_SECONDS,
            "StandardOutPath": str(service.log),
            "StandardErrorPath": str(service.log),
        }
    )


def task_xml(service: Service, user: str) -> bytes:
    """In UTF-16, as schtasks reads it. `user`: DOMAIN\\name. The Task Scheduler does not start a program again that
    ends with an exit code, so PowerShell does that in a loop."""
    ElementTree.register_namespace("", _TASK)
    task = ElementTree.Element(f"{{{_TASK}}}Task", version="1.2")

    def add(parent: ElementTree.Element, name: str, text: str = "", **attributes: str) -> ElementTree.Element:
        element = ElementTree.SubElement(parent, f"{{{_TASK}}}{name}", attributes)
        element.text = text or None
        return element

    add(add(task, "RegistrationInfo"), "Description", service.title)
    trigger = add(add(task, "Triggers"), "LogonTrigger")
    add(trigger, "Enabled", "true")
    add(trigger, "UserId", user)
    principal = add(add(task, "Principals"), "Principal", id="owner")
    for name, text in (("UserId", user), ("LogonType", "InteractiveToken"), ("RunLevel", "LeastPrivilege")):
        add(principal, name, text)
    settings = add(task, "Settings")
    for name, text in (
        ("MultipleInstancesPolicy", "IgnoreNew"),
        ("DisallowStartIfOnBatteries", "false"),
        ("StopIfGoingOnBatteries", "false"),
        ("ExecutionTimeLimit", "PT0S"),
        ("Enabled", "true"),
    ):
        add(settings, name, text)
    action = add(add(task, "Actions", Context="owner"), "Exec")
    add(action, "Command", "powershell.exe")
    add(action, "Arguments", f'-NoProfile -WindowStyle Hidden -Command "{_loop(service)}"')
    add(action, "WorkingDirectory", str(service.folder))
    content: bytes = ElementTree.tostring(task, encoding="utf-16")
    return content


def _loop(service: Service) -> str:
    variables = "".join(f"$env:{name} = {_powershell_word(value)}; " for name, value in service.environment.items())
    call = " ".join(map(_powershell_word, service.command))
    return (
        f"{variables}do {{ & {call} *>> {_powershell_word(str(service.log))}; $code = $LASTEXITCODE; "
        f"if ($code -ne 0) {{ Start-Sleep {RESTART_SECONDS} }} }} while ($code -ne 0)"
    )


def _powershell_word(word: str) -> str:
    """A quoted word. A Windows path has no double quote, which would end the argument around it."""
    return "'" + word.replace("'", "''").replace('"', "") + "'"
