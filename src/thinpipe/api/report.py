"""Writes the report of a run from its event log, with a comparison to other runs if asked. Imports torch only to
generate a sample."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinpipe.config.families import PRESETS, read_model
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import MANIFEST, checkpoints_path, step_folders
from thinpipe.report.context import ReportContext, settings_of
from thinpipe.report.document import Quote
from thinpipe.report.figures import pyplot
from thinpipe.report.save import save_report
from thinpipe.report.sections import write_report
from thinpipe.report.summary import Summary, summarise


@dataclass(frozen=True)
class WrittenReport:
    page: Path
    """Path of report.html."""
    summary: Summary
    others: dict[str, Summary]
    """Summaries of the runs compared with, by name."""


def make_report(
    run: Path, *, output: Path | None = None, sample: str | None = None, against: Sequence[Path] = ()
) -> WrittenReport:
    """Writes the report of the run folder `run` into `output`, by default the folder `report` of the run.

    `sample`: a prompt that the model continues. `against`: run folders to compare with. Raises UserError.
    """
    pyplot()  # fail early if matplotlib is missing
    summary, name = summarise(run), run.resolve().name
    others = {other.resolve().name: summarise(other) for other in against}
    if len({name, *others}) <= len(against):
        raise UserError("two of these runs have folders of the same name: rename a folder, or leave one out")
    dim, width, has_projection = _widths(run, summary)
    context = ReportContext(
        folder=run,
        dim=dim,
        state_width=width,
        has_projection=has_projection,
        defaults=tomllib.loads(dump_toml(RunConfig())),
        sample=None if sample is None else Quote(sample, _continued(run, sample)),
        against=others,
    )
    return WrittenReport(save_report(write_report(summary, context), output or run / "report"), summary, others)


def _continued(run: Path, prompt: str) -> str:
    from thinpipe.api.model import load  # imports torch

    return load(run).generate(prompt)


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
