"""`thinpipe doctor`: looks at what may stop a run before it is started, and says what to do. It changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from thinpipe.core.config import load_toml
from thinpipe.core.errors import UserError
from thinpipe.train.doctor_config import DoctorConfig
from thinpipe.train.doctor_machine import machine_findings
from thinpipe.train.finding import Finding, in_a_table, not_checked, problem
from thinpipe.train.hub_config import HubConfig
from thinpipe.train.shipped import settings_file


def run(config: DoctorConfig) -> int:
    """Exit code 1 when there is a problem."""
    findings = list(examine(config))
    if config.json:
        print(msgspec.json.encode(findings).decode())
    else:
        Console(highlight=False).print(in_a_table(findings))
    return int(any(finding.state == "problem" for finding in findings))


def examine(config: DoctorConfig) -> Iterator[Finding]:
    swarm = config.hub is not None or config.invite is not None
    machine = machine_findings(swarm=swarm, host=config.host, device=config.device)
    yield from machine
    broken = {finding.what for finding in machine if finding.state == "problem"}
    if config.run is not None:
        if "torch" in broken:
            yield not_checked("run", "needs torch")
        else:
            yield from _of_run(config.run, config.host)
    if swarm:
        if "extras" in broken:
            yield not_checked("hub", "needs the extra swarm")
        else:
            from thinpipe.train.doctor_hub import hub_findings  # needs that extra

            yield from hub_findings(config)


def _of_run(path: Path, host: bool) -> Iterator[Finding]:
    from thinpipe.train.doctor_run import port_finding, run_findings  # needs torch

    try:
        settings = load_toml(settings_file(str(path)), HubConfig)
    except UserError as error:
        yield problem("settings", str(error), "Change the file as it says.")
        return
    yield from run_findings(settings)
    if host:
        yield port_finding(settings)
