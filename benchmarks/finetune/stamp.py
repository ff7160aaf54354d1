"""Stamp of a study: the data and constants behind its work and records. Folders with another stamp are refused."""

import json
from pathlib import Path
from typing import Any

from benchmarks.convergence.execute import has_settings, result_path, settings_of
from benchmarks.finetune.runs import (
    BOOKS,
    BOOKS_FOLDER,
    PRETRAINED,
    SAMPLES,
    SEQ_LEN,
    VALIDATION_SAMPLES,
    Pretraining,
)
from thinpipe.core.errors import UserError
from thinpipe.core.files import file_sha256, write_atomically
from thinpipe.data.manifest import MANIFEST_NAME

Stamp = dict[str, str]
"""Name of an input -> its hash, size or settings. A manifest's hash covers all shards and the tokenizer."""
_SETTINGS = "settings of the pretraining"
"""Entry of a stamp with the settings as TOML, which are compared by value: defaults that are newer than the stamp, and
renamed settings, make no difference."""


def stamp_of(data: Path) -> Stamp:
    manifests = {f"{side} of --data": data / side / MANIFEST_NAME for side in ("train", "validation")}
    for path in manifests.values():
        if not path.is_file():
            raise UserError(f"{path} does not exist: name a folder made by `thinpipe tokenize --validation-sources`")
    return {
        **{name: file_sha256(path) for name, path in manifests.items()},
        "size of the books": f"{BOOKS} x {SAMPLES} and {VALIDATION_SAMPLES} samples of {SEQ_LEN}",
        _SETTINGS: settings_of(Pretraining()),
    }


def read_stamp(work: Path) -> Stamp:
    path = _path(work)
    stamp: Stamp = json.loads(path.read_text()) if path.is_file() else {}
    return stamp


def claim_folders(work: Path, output: Path, stamp: Stamp) -> None:
    """Marks `work`, unless it or the records in `output` rest on something else."""
    used = _path(work).is_file() or any((work / name).exists() for name in (BOOKS_FOLDER, PRETRAINED))
    record = result_path(Pretraining(), output)
    found = [(work, read_stamp(work))] if used else []
    found += [(output, _stamp_of_record(json.loads(record.read_text())))] if record.is_file() else []
    for folder, other in found:
        changed = [name for name, value in stamp.items() if name != _SETTINGS and other.get(name) != value]
        if not has_settings(Pretraining(), other.get(_SETTINGS, ""), where=folder):
            changed.append(_SETTINGS)
        if changed:
            raise UserError(
                f"{folder} was made with other inputs ({', '.join(changed)}): name other folders as --work and "
                "--output, or remove both of these"
            )
    work.mkdir(parents=True, exist_ok=True)
    write_atomically(_path(work), json.dumps(stamp, indent=1).encode())


def _stamp_of_record(record: dict[str, Any]) -> Stamp:
    stamp: Stamp = record.get("stamp", {})
    return {**stamp, _SETTINGS: record.get("settings", "")}


def _path(work: Path) -> Path:
    return work / "stamp.json"
