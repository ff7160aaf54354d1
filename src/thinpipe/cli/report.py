"""`thinpipe report`: a page from the event log of a run, and how it compares with others. Needs torch for a
sample only."""

import tomllib
from pathlib import Path

import msgspec

from thinpipe.cli.settings import GenerateConfig, ReportConfig
from thinpipe.core.config import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.models.presets import PRESETS
from thinpipe.report.background import Background, settings_of
from thinpipe.report.comparison import compare, say_cost
from thinpipe.report.document import Quote
from thinpipe.report.figures import pyplot
from thinpipe.report.files import save_report
from thinpipe.report.sections import write_report
from thinpipe.report.summary import Summary, summarise
from thinpipe.train.config import RunConfig


def run(config: ReportConfig) -> int:
    pyplot()  # says at once if it is missing
    summary, name = summarise(config.run), config.run.resolve().name
    others = {other.resolve().name: summarise(other) for other in config.against}
    if len({name, *others}) <= len(config.against):
        raise UserError("two of these runs have the same name: rename a folder, or leave one out")
    dim, width, has_neck = _widths(config.run, summary)
    background = Background(
        folder=config.run,
        dim=dim,
        state_width=width,
        has_neck=has_neck,
        defaults=tomllib.loads(dump_toml(RunConfig())),
        sample=None if config.sample is None else Quote(config.sample, _continued(config.run, config.sample)),
        against=others,
    )
    page = save_report(write_report(summary, background), config.output or config.run / "report")
    for line in compare({name: summary, **others}) if others else summary.lines():
        print(line)
    for other in others:
        print(f"{name} against {other}: {say_cost(summary, others[other])}")
    print(page)
    return 0


def _continued(run: Path, prompt: str) -> str:
    from thinpipe.cli.generate import continuation  # imports torch

    return "".join(continuation(GenerateConfig(run=run, prompt=prompt)))


class _Manifest(msgspec.Struct):
    """What is needed of a checkpoint's."""

    model: dict[str, object]


def _widths(run: Path, summary: Summary) -> tuple[int | None, int | None, bool]:
    """The model's, that of what crosses its boundaries, and whether a neck makes it so: from the settings, or from a
    checkpoint where the model came from elsewhere. None where neither says it."""
    settings = settings_of(summary).get("model", {})
    preset = PRESETS.get(str(settings.get("preset", "")))
    dim = settings.get("dim", preset.dim if preset else None)
    if "initial" in settings:
        manifests = sorted(run.glob("checkpoints/step-*/manifest.json"))
        if not manifests:
            return None, None, False
        settings = msgspec.json.decode(manifests[-1].read_bytes(), type=_Manifest).model
        dim = settings.get("dim")
    found = [settings.get(part) for part in ("neck", "subspace")]
    parts = [part if isinstance(part, dict) else {} for part in found]  # the text may be a peer's
    width = next((part["width"] for part in parts if part.get("width")), dim)
    return _whole(dim), _whole(width), bool(parts[0].get("width"))


def _whole(found: object) -> int | None:
    return found if isinstance(found, int) else None
