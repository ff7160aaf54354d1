"""Report of a self-test: verdict, JSON and Markdown. Both files are for public issues: they have no names of users or
hosts, no paths and no addresses (`without_names`)."""

import getpass
import platform
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

import thinpipe
from thinpipe.core.numerics import NUMERICS_VERSION
from thinpipe.device.memory import device_name
from thinpipe.doctor.finding import Finding, State
from thinpipe.selftest.check import RECIPE_NAMES, CheckResult, Subject, Use

_FORMAT = 1
_TRAINING = "training in "
_USES: dict[Use, tuple[str, str]] = {
    **{name: (_TRAINING + name, f'Do not set training.precision = "{name}"') for name in RECIPE_NAMES},
    "offload": ('training.offload = "optimizer"', 'Do not set training.offload = "optimizer"'),
    "several processes": ("runs of several processes and of hubs", "Do not join a hub or start several processes"),
    "memory figures": ("memory figures of `plan` and of hubs", "Do not rely on memory figures of `plan` and of hubs"),
}
"""Uses of a machine as a verdict says them: if it is fine, and if it is not."""
_MIN_NAME_CHARACTERS = 3
"""Shorter names of users and hosts stay: they would be found inside of words."""
_PATH = r"(?:~|\b[A-Za-z]:)[/\\][^\s'\"`]*|\\\\[^\s'\"`]+|(?<![\w/.])/(?:[\w.@+~-]+/)+[\w.@+~-]*"
_IPV4 = r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
_IPV6 = r"(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{0,4}(?![\w:])"
_EMAIL = r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
_URL = r"\b\w+://\S+"
_PRIVATE = re.compile("|".join((_URL, _EMAIL, _PATH, _IPV4, _IPV6)))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a self-test found."""

    format: int = _FORMAT
    verdict: list[str]
    """Sentences: what the machine is fine for, what it must not be used for and why, what could not be said."""
    device: str
    device_type: str
    thinpipe: str = thinpipe.__version__
    numerics_version: int = NUMERICS_VERSION
    torch: str
    python: str
    system: str
    threads: int
    quick: bool
    seconds: float
    checks: list[CheckResult]

    @property
    def is_wrong(self) -> bool:
        return any(result.finding.state == "problem" for result in self.checks)


def make_report(subject: Subject, results: Sequence[CheckResult], seconds: float) -> Report:
    return Report(
        verdict=verdict(results),
        device=device_name(subject.device),
        device_type=subject.device.type,
        torch=str(torch.__version__),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        quick=subject.quick,
        seconds=round(seconds, 1),
        checks=list(results),
    )


def verdict(results: Sequence[CheckResult]) -> list[str]:
    fine, wrong, unknown = [], [], []
    for use, (good, bad) in _USES.items():
        findings = [result.finding for result in results if use in result.uses]
        if problems := _in_state(findings, "problem"):
            wrong.append(f"{bad}, because {_cause(problems)}.")
        elif missing := _in_state(findings, "not checked"):
            unknown.append(f"Cannot say anything about {good}, because {_cause(missing)}.")
        elif findings:
            fine.append(good)
    recipes = [good.removeprefix(_TRAINING) for good in fine if good.startswith(_TRAINING)]
    listed = [*([_TRAINING + ", ".join(recipes)] if recipes else []), *fine[len(recipes) :]]
    return [*([f"This machine is fine for {'; '.join(listed)}."] if listed else []), *wrong, *unknown]


def _in_state(findings: Sequence[Finding], state: State) -> list[Finding]:
    return [finding for finding in findings if finding.state == state]


def _cause(findings: Sequence[Finding]) -> str:
    others = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"{findings[0].what}: {findings[0].text}{others}"


def save(report: Report, folder: Path) -> tuple[Path, Path]:
    """Writes selftest.json and selftest.md without private names; returns their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    public = without_names(report)
    paths = folder / "selftest.json", folder / "selftest.md"
    paths[0].write_bytes(msgspec.json.format(msgspec.json.encode(public), indent=1) + b"\n")
    paths[1].write_text(markdown(public), encoding="utf-8")
    return paths


def markdown(report: Report) -> str:
    about = [
        ("device", f"{report.device} ({report.device_type})"),
        ("system", f"{report.system}, Python {report.python}, torch {report.torch}, {report.threads} thread(s)"),
        ("thinpipe", f"{report.thinpipe}, numerics version {report.numerics_version}"),
        ("duration", f"{report.seconds:.0f} s{', --quick' if report.quick else ''}"),
    ]
    lines = [f"## thinpipe selftest: {_cell(report.device)}", "", *(f"- {sentence}" for sentence in report.verdict)]
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in about)]
    lines += ["", "| check | result | found | figures |", "|---|---|---|---|"]
    for result in report.checks:
        figures = ", ".join(f"{name} {_figure(value)}" for name, value in result.figures.items())
        finding = result.finding
        lines.append(f"| {finding.what} | {finding.state} | {_cell(finding.text)} | {_cell(figures)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def without_names(report: Report) -> Report:
    """The report without paths, addresses, and names of this user and this host, wherever a text has them."""
    private = [getpass.getuser(), Path.home().name, socket.gethostname(), socket.gethostname().partition(".")[0]]
    names = sorted({name for name in private if len(name) >= _MIN_NAME_CHARACTERS}, key=len, reverse=True)
    own = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in names) or r"(?!)", re.IGNORECASE)

    def clean(value: object) -> object:
        if isinstance(value, str):
            return _PRIVATE.sub("PLACE", own.sub("NAME", value))
        if isinstance(value, dict):
            return {clean(key): clean(item) for key, item in value.items()}
        return [clean(item) for item in value] if isinstance(value, list | tuple) else value

    return msgspec.convert(clean(msgspec.to_builtins(report)), Report)
