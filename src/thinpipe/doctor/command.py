"""`thinpipe doctor`: finds what would keep a run from working before it is started, with fixes. Changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from thinpipe.config.doctor import DoctorConfig
from thinpipe.config.hub import HubConfig
from thinpipe.config.presets import settings_file
from thinpipe.config.toml import load_toml
from thinpipe.core.errors import UserError
from thinpipe.doctor.finding import Finding, findings_table, not_checked, problem
from thinpipe.doctor.machine import machine_findings


def run(config: DoctorConfig) -> int:
    """Prints all findings; exit code 1 if any is a problem."""
    findings = list(examine(config))
    if config.json:
        print(msgspec.json.encode(findings).decode())
    else:
        Console(highlight=False).print(findings_table(findings))
    return int(any(finding.state == "problem" for finding in findings))


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Runs the checks that the settings ask for; skips those whose dependencies are missing."""
    swarm = config.hub is not None or config.invite is not None
    machine = machine_findings(swarm=swarm, host=config.host, device=config.device)
    yield from machine
    broken = {finding.what for finding in machine if finding.state == "problem"}
    if config.run is not None:
        if "torch" in broken:
            yield not_checked("run", "needs torch")
        else:
            yield from _run_findings(config.run, config.host)
    if swarm:
        if "extras" in broken:
            yield not_checked("hub", "needs the extra swarm")
        else:
            from thinpipe.doctor.hub import hub_findings  # needs that extra

            yield from hub_findings(config)


def _run_findings(path: Path, host: bool) -> Iterator[Finding]:
    from thinpipe.doctor.disk_and_port import port_finding
    from thinpipe.doctor.run import run_findings  # needs torch

    try:
        settings = load_toml(settings_file(str(path)), HubConfig)
    except UserError as error:
        yield problem("settings", str(error), "Correct the settings file.")
        return
    yield from run_findings(settings, keep_ends=settings.hub.keep_ends)
    if host:
        yield port_finding(settings)
