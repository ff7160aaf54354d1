"""`thinpipe report`: writes a page from the event log of a run, with a comparison to other runs if asked. Imports torch
only to generate a sample."""

import tomllib
from pathlib import Path

from thinpipe.config.commands import GenerateConfig, ReportConfig
from thinpipe.config.families import PRESETS, read_model
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import MANIFEST, checkpoints_path, step_folders
from thinpipe.report.comparison import compare, describe_cost
from thinpipe.report.context import ReportContext, settings_of
from thinpipe.report.document import Quote
from thinpipe.report.figures import pyplot
from thinpipe.report.save import save_report
from thinpipe.report.sections import write_report
from thinpipe.report.summary import Summary, summarise


def run(config: ReportConfig) -> int:
    pyplot()  # fail early if matplotlib is missing
    summary, name = summarise(config.run), config.run.resolve().name
    others = {other.resolve().name: summarise(other) for other in config.against}
    if len({name, *others}) <= len(config.against):
        raise UserError("two of these runs have folders of the same name: rename a folder, or leave one out")
    dim, width, has_projection = _widths(config.run, summary)
    context = ReportContext(
        folder=config.run,
        dim=dim,
        state_width=width,
        has_projection=has_projection,
        defaults=tomllib.loads(dump_toml(RunConfig())),
        sample=None if config.sample is None else Quote(config.sample, _continued(config.run, config.sample)),
        against=others,
    )
    page = save_report(write_report(summary, context), config.output or config.run / "report")
    for line in compare({name: summary, **others}) if others else summary.lines():
        print(line)
    for other in others:
        print(f"{name} against {other}: {describe_cost(summary, others[other])}")
    print(page)
    return 0


def _continued(run: Path, prompt: str) -> str:
    from thinpipe.cli.generate import continuation  # imports torch

    return "".join(continuation(GenerateConfig(run=run, prompt=prompt)))


def _widths(run: Path, summary: Summary) -> tuple[int | None, int | None, bool]:
    """Model width, width of the states that cross boundaries, and whether a boundary projection sets the latter. Taken
    from the settings, or from the newest checkpoint if the model was initialised from another one; None if unknown."""
    settings = settings_of(summary).get("model", {})
    preset = PRESETS.get(str(settings.get("preset", "")))
    dim = settings.get("dim", preset.dim if preset else None)
    if "initial" in settings:
        manifests = (folder / MANIFEST for folder in step_folders(checkpoints_path(run)))
        newest = next((manifest for manifest in manifests if manifest.exists()), None)
        if newest is None:
            return None, None, False
        try:
            model = read_model(newest)
        except UserError:  # a page without these widths is better than none
            return None, None, False
        return model.dim, model.state_width, model.has_projection
    found = [settings.get(part) for part in ("projection", "subspace")]
    parts = [part if isinstance(part, dict) else {} for part in found]  # written by a peer, so it may be anything
    width = next((part["width"] for part in parts if part.get("width")), dim)
    return _whole(dim), _whole(width), bool(parts[0].get("width"))


def _whole(found: object) -> int | None:
    return found if isinstance(found, int) else None
