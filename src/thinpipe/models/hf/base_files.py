"""The files of the model that a run trains on: in a folder, or on the Hugging Face hub, from which single files are
downloaded into its cache when they are needed."""

from pathlib import Path
from typing import Any

from thinpipe.core.errors import UserError
from thinpipe.models.hf.config import CONFIG, INDEX, SINGLE_FILE
from thinpipe.models.hf.model_hub import HubModel
from thinpipe.models.hf.weights import StoredTensors


def pinned_source(source: str) -> tuple[str, Path]:
    """The source with the commit that its revision means now, so that all processes and later runs read the same files;
    and the folder that has its config.json. Raises UserError."""
    hub = HubModel.of(source)
    if hub is None:
        return str(Path(source).absolute()), Path(source)
    config = hub.fetch(CONFIG)
    if config is None:
        raise UserError(f"{hub} has no {CONFIG}")
    return str(HubModel(hub.name, config.parent.name)), config.parent


def base_file(source: str, name: str) -> Path | None:
    """A small file of the base, such as tokenizer.json; None if it has none."""
    hub = HubModel.of(source)
    if hub is not None:
        return hub.fetch(name)
    path = Path(source) / name
    return path if path.is_file() else None


class _HubTensors(StoredTensors):
    """Tensors of a model of the Hugging Face hub: a file is downloaded when the first of its tensors is read."""

    def __init__(self, hub: HubModel) -> None:
        self._hub = hub
        found = hub.fetch(INDEX) or hub.fetch(SINGLE_FILE)
        if found is None:
            raise UserError(f"{hub} has neither {INDEX} nor {SINGLE_FILE}: use a model with safetensors files")
        super().__init__(found.parent, "")

    def _open(self, file: str) -> Any:
        if file not in self._opened and Path(file).name == file:
            self._hub.fetch(file)
        return super()._open(file)


def open_source(source: str) -> StoredTensors:
    """The tensors of a folder or of a model of the Hugging Face hub, none of them read. Raises UserError."""
    hub = HubModel.of(source)
    return StoredTensors(Path(source), "") if hub is None else _HubTensors(hub)
