"""Files of services by what the systems' own readers make of them, and the program that a service runs.

systemd, launchd and the Task Scheduler are not started: containers have no systemd of a user, and there is no Mac and
no Windows here.
"""

import os
import plistlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from thinpipe.cli import main
from thinpipe.config.hub import HubConfig, HubSettings, ServiceConfig
from thinpipe.config.run import JobConfig
from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import hub_start_path
from thinpipe.swarm.peer.identity import Identity, load_identity, save_identity
from thinpipe.swarm.service.definition import Service, service_of
from thinpipe.swarm.service.files import launchd_plist, systemd_unit, task_xml
from thinpipe.swarm.service.managers import install, manager_of, remove, status

SYSTEMS = ("linux", "darwin", "win32")
ODD = Service(
    name="thinpipe-join-friends-bert-0a1b2c",
    title="thinpipe: bert in run friends, 100 % of it",
    command=(sys.executable, "-m", "thinpipe", "join", "/home/be rt/it's 50% $HOME", "--memory", "12GB"),
    folder=Path("/tmp"),
    log=Path("/home/be rt/it's 50% $HOME/service.log"),
    environment={"OMP_NUM_THREADS": "4", "HF_HOME": '/mnt/the "big" disk'},
)


@pytest.fixture
def joined(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "joined" / "i1"
    folder.mkdir(parents=True)
    fields = dict.fromkeys(("invite", "url", "fingerprint", "seed", "jwt", "renewal"), "")
    save_identity(folder, Identity(run="My Run", name="bert", **fields))
    return folder


def test_systemd_reads_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze")
    unit = tmp_path / f"{ODD.name}.service"
    unit.write_text(systemd_unit(ODD))
    tmp_path.chmod(0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = ["systemd-analyze", "verify", "--user", unit]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])


def test_a_unit_names_command_folder_and_restarts():
    lines = systemd_unit(ODD).splitlines()
    start = next(line for line in lines if line.startswith("ExecStart="))
    assert start.endswith('"join" "/home/be rt/it\'s 50%% $$HOME" "--memory" "12GB"')
    assert {"Restart=on-failure", "KillMode=mixed", "WorkingDirectory=/tmp"} < set(lines)
    assert 'Environment="HF_HOME=/mnt/the \\"big\\" disk"' in lines
    assert "Description=thinpipe: bert in run friends, 100 %% of it" in lines


def test_no_name_of_a_run_takes_the_next_line_of_a_unit():
    lines = systemd_unit(replace(ODD, title="bert in run friends\\")).splitlines()
    assert "Description=bert in run friends" in lines


def test_launchd_reads_the_plist():
    plist = plistlib.loads(launchd_plist(ODD))
    assert plist["ProgramArguments"] == list(ODD.command)
    assert (plist["Label"], plist["WorkingDirectory"], plist["RunAtLoad"]) == (ODD.name, "/tmp", True)
    assert plist["KeepAlive"] == {"SuccessfulExit": False}, "a run that has ended is not begun again"
    assert plist["EnvironmentVariables"] == ODD.environment


def test_the_task_is_xml_in_utf_16_with_a_loop_for_powershell():
    content = task_xml(ODD, "PC\\bert")
    assert content[:2] in (b"\xff\xfe", b"\xfe\xff")
    task = ElementTree.fromstring(content.decode("utf-16").partition("?>")[2])
    place = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    assert task.find("t:Triggers/t:LogonTrigger/t:UserId", place).text == "PC\\bert"
    assert task.find("t:Settings/t:ExecutionTimeLimit", place).text == "PT0S", "no end after three days"
    assert task.find("t:Actions/t:Exec/t:WorkingDirectory", place).text == "/tmp"
    arguments = task.find("t:Actions/t:Exec/t:Arguments", place).text
    loop = re.fullmatch(r'-NoProfile -WindowStyle Hidden -Command "([^"]*)"', arguments)[1]
    assert "'join' '/home/be rt/it''s 50% $HOME' '--memory' '12GB' *>> " in loop
    assert loop.endswith("while ($code -ne 0)")


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_a_file_and_commands_that_name_the_service(system, tmp_path):
    manager = manager_of(ODD, system, tmp_path)
    for command in (*manager.install[-1:], *manager.remove, manager.status):
        assert command[0] == manager.program
        assert ODD.name in " ".join(command)
    assert manager.content
    assert manager.starts


def test_a_name_that_a_hub_gave_its_run_adds_no_line_to_a_unit(joined):
    named = replace(load_identity(joined), run="mine\nExecStartPre=/bin/evil\r[Service]\nUser=root")
    save_identity(joined, named)
    unit = systemd_unit(service_of(ServiceConfig(action="install", folder=joined)))
    assert [line for line in unit.splitlines() if line.startswith(("ExecStartPre", "User"))] == []
    assert unit.splitlines().count("[Service]") == 1


def test_a_joined_machine_and_a_hub_have_a_service_and_nobody_else(joined, tmp_path):
    service = service_of(ServiceConfig(action="install", folder=Path("joined/i1"), memory="12GB", device="cpu"))
    assert re.fullmatch(r"thinpipe-join-my-run-bert-[0-9a-f]{6}", service.name)
    assert service.command[1:5] == ("-m", "thinpipe", "join", str(joined))
    assert " ".join(service.command[5:]).startswith("--device cpu --memory 12GB")
    assert service.folder == tmp_path
    with pytest.raises(UserError, match="is neither the dump_folder of a hub that was started once, nor a folder made"):
        service_of(ServiceConfig(action="install", folder=tmp_path))

    config = HubConfig(job=JobConfig(dump_folder=Path("runs/h")), hub=HubSettings(peers=3, up="20mbps", down="1gbps"))
    hub_start_path(Path("runs/h")).parent.mkdir(parents=True)
    hub_start_path(Path("runs/h")).write_text(dump_toml(config))
    assert load_toml(hub_start_path(Path("runs/h")), HubConfig) == config
    hub = service_of(ServiceConfig(action="install", folder=Path("runs/h")))
    assert hub.command[1:] == ("-m", "thinpipe", "hub", str(hub_start_path(tmp_path / "runs/h")))
    with pytest.raises(UserError, match="--memory, --base and --address are for joined machines"):
        service_of(ServiceConfig(action="install", folder=Path("runs/h"), memory="1GB"))
    os.chdir("runs")
    with pytest.raises(UserError, match="the hub was started in another folder, from which runs/h leads to"):
        service_of(ServiceConfig(action="install", folder=Path("h")))


def test_a_manager_that_is_not_there_or_refuses_says_what_is_left(joined, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main(["service", "status", str(joined)]) == 0
    assert "there is no service for this folder: `thinpipe service install` makes one" in capsys.readouterr().out
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    manager = manager_of(service_of(ServiceConfig(action="install", folder=joined)), "linux", tmp_path / "home")
    with pytest.raises(UserError, match="there is no systemctl on this system, so no service was installed"):
        install(manager)
    assert not manager.file.exists()
    (programs / "systemctl").write_text("#!/bin/sh\necho no bus >&2; exit 1\n")
    (programs / "systemctl").chmod(0o700)
    with pytest.raises(UserError, match=r"is written, and the service does not run: `systemctl --user .* \(no bus\)"):
        install(manager)
    assert manager.file.stat().st_mode & 0o777 == 0o600
    assert "no bus" in status(manager)
    assert "no bus" in remove(manager)
    assert not manager.file.exists()
    assert "there is no service" in remove(manager)


def test_systemctl_is_asked_for_what_makes_it_start_with_the_machine(joined, tmp_path, monkeypatch):
    """With programs in place of systemd's that write down how they were called."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    for name in ("systemctl", "loginctl"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\n[ {name} = systemctl ]\n')
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(programs))
    service = service_of(ServiceConfig(action="install", folder=joined))
    manager = manager_of(service, "linux", tmp_path / "home")
    assert "it starts whenever you sign in (with the machine after: sudo loginctl enable-linger $USER)" in install(
        manager
    )
    assert calls.read_text().splitlines() == [
        "systemctl --user daemon-reload",
        f"systemctl --user enable --now {service.name}.service",
        "loginctl enable-linger",
    ]
