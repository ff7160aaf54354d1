"""The base of a hub's run on a Hugging Face model: what it consists of, and its tensors for peers that fetch them.

A peer asks for `base/base.json`, the statement, and for `base/<sha256>`, the content of one tensor. The hub needs the
base's files on its disk; a model of the Hugging Face hub is downloaded into its cache.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.models.hf.model_of_run import state_of_model
from thinpipe.swarm.hub.services.files import FileRange
from thinpipe.swarm.protocol.base_files import STATEMENT_FILE, tensor_file


class ServedBase:
    """Reads all of the base once when it is made, for its hashes. `file`: where the statement is written. Raises
    UserError."""

    def __init__(self, model: HuggingFaceModelConfig, file: Path) -> None:
        self.model, self.source, self._file = model, model.source, file
        self.statement, places = state_of_model(model)
        self._ranges = {
            tensor_file(tensor.sha256): FileRange(
                path=places[tensor.name].path,
                offset=places[tensor.name].offset,
                nbytes=tensor.nbytes,
                sha256=tensor.sha256,
            )
            for tensor in self.statement.tensors
        }
        self._stamps = {path: _stamp(path) for path in {place.path for place in places.values()}}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, msgspec.json.encode(self.statement))

    def find(self, name: str) -> Path | FileRange | None:
        """The file with this name; see `services.files.Find`."""
        return self._file if name == STATEMENT_FILE else self._ranges.get(name)

    def refuse_changed(self) -> None:
        """Raises UserError if a file of the base is another one than when its tensors were hashed."""
        for path, stamp in self._stamps.items():
            if not path.is_file() or _stamp(path) != stamp:
                raise UserError(
                    f"{path} has changed since the hub has read it: restore the base that the run began with, and "
                    "start the hub again"
                )

    def nbytes(self, segments: Sequence[int]) -> int:
        """Bytes of the tensors that these segments read."""
        return sum(tensor.nbytes for tensor in self.statement.of_segments(segments))


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
