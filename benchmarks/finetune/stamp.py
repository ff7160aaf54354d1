"""What the work of a study rests on: the data and the constants. Work and records of anything else are refused."""

import hashlib
import json
from pathlib import Path

from benchmarks.convergence.execute import result_path, settings_of
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
"""By what it is of; manifests name the hashes of all shards and of the tokenizer."""


def stamp_of(data: Path) -> Stamp:
    manifests = {f"{side} of --data": data / side / MANIFEST_NAME for side in ("train", "validation")}
    for path in manifests.values():
        if not path.is_file():
            raise UserError(f"{path} does not exist: name a folder made by `thinpipe tokenize --validation-sources`")
    return {
        **{name: file_sha256(path) for name, path in manifests.items()},
        "size of the books": f"{BOOKS} x {SAMPLES} and {VALIDATION_SAMPLES} samples of {SEQ_LEN}",
        "pretraining": hashlib.sha256(settings_of(Pretraining()).encode()).hexdigest(),
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
    found += [(output, json.loads(record.read_text()).get("stamp", {}))] if record.is_file() else []
    for folder, other in found:
        changed = [name for name, value in stamp.items() if other.get(name) != value]
        if changed:
            raise UserError(
                f"{folder} was made with another {' and another '.join(changed)}: name other folders as --work and "
                "--output, or remove both of these"
            )
    work.mkdir(parents=True, exist_ok=True)
    write_atomically(_path(work), json.dumps(stamp, indent=1).encode())


def _path(work: Path) -> Path:
    return work / "stamp.json"
