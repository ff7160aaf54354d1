"""The files of the model that a run trains on: in a folder, or on the Hugging Face hub, from which single files are
downloaded into its cache when they are needed."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinpipe.config.huggingface_model import HUB_PREFIX
from thinpipe.core.errors import UserError
from thinpipe.models.hf.config import read_json_object
from thinpipe.models.hf.weights import INDEX, SINGLE_FILE, StoredTensors

CONFIG = "config.json"
_MAX_INDEX_NBYTES = 100_000_000


@dataclass(frozen=True)
class HubModel:
    """A model of the Hugging Face hub."""

    name: str
    revision: str | None

    @classmethod
    def of(cls, source: str) -> "HubModel | None":
        """None if the source is a folder."""
        if not source.startswith(HUB_PREFIX):
            return None
        name, _, revision = source.removeprefix(HUB_PREFIX).partition("@")
        return cls(name, revision or None)

    def fetch(self, file: str) -> Path | None:
        """A file in the cache, downloaded unless it is there; None if the model has no such file. Raises UserError."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(self.name, file, revision=self.revision))
        except LocalEntryNotFoundError as error:  # offline, and not in the cache
            if file != CONFIG and self.fetch(CONFIG) is not None:
                return None
            raise UserError(f"{self} is not in the cache of this machine and cannot be downloaded: {error}") from error
        except EntryNotFoundError:
            return None
        except Exception as error:  # of the library and of its transport: no such model, no rights, no network
            raise UserError(f"{self} cannot be downloaded: {_first_line(error)}") from error

    def has(self, file: str) -> bool:
        """Whether a file is in the cache."""
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(self.name, file, revision=self.revision), str)

    def size(self, file: str) -> int | None:
        """Bytes of a file, which is not downloaded; None if the model has no such file. Raises UserError."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError

        if self.has(file):
            return fetched.stat().st_size if (fetched := self.fetch(file)) is not None else None
        try:
            return get_hf_file_metadata(hf_hub_url(self.name, file, revision=self.revision)).size or 0
        except EntryNotFoundError:
            return None
        except Exception as error:  # of the library and of its transport: no such model, no rights, no network
            raise UserError(f"{self} cannot be downloaded: {_first_line(error)}") from error

    def files_of(self, tensors: Collection[str]) -> list[str]:
        """Names of the files with these tensors; at most the index is downloaded. Raises UserError."""
        nbytes = self.size(INDEX)
        if nbytes is None:
            return [SINGLE_FILE]
        if nbytes > _MAX_INDEX_NBYTES or (index := self.fetch(INDEX)) is None:
            raise UserError(f"{self} has no {INDEX} that can be read")
        weight_map = read_json_object(index).get("weight_map", {})
        files = sorted({str(weight_map.get(name)) for name in tensors})
        strange = next((file for file in files if Path(file).name != file or not file.endswith(".safetensors")), None)
        if strange is not None:
            raise UserError(f"{self} has no safetensors file for every tensor of the base ({strange[:80]!r})")
        return files

    @property
    def endpoint(self) -> str:
        """Address of the model hub, as this machine's environment says."""
        from huggingface_hub import constants

        return str(constants.ENDPOINT)

    def __str__(self) -> str:
        return f"{HUB_PREFIX}{self.name}" + (f"@{self.revision}" if self.revision else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


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
