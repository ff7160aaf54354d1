"""Models of the Hugging Face hub: single files, their sizes, and the shapes of tensors. Imports no torch.

Files are downloaded into the cache of the library huggingface_hub.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from thinpipe.config.huggingface_model import HUB_PREFIX
from thinpipe.core.errors import UserError
from thinpipe.core.safetensors_header import tensor_places
from thinpipe.models.hf.config import CONFIG, INDEX, SINGLE_FILE, read_json_object

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
        nbytes = None if self._is_one_file_here() else self.size(INDEX)
        if nbytes is None:
            return [SINGLE_FILE]
        if nbytes > _MAX_INDEX_NBYTES or (index := self.fetch(INDEX)) is None:
            raise UserError(f"{self} has no {INDEX} that can be read")
        weight_map = read_json_object(index).get("weight_map", {})
        return self._safetensors_files({str(weight_map.get(name)) for name in tensors})

    def _is_one_file_here(self) -> bool:
        """Whether all weights are in the cache, in one file. Asks no network."""
        return self.has(SINGLE_FILE) and not self.has(INDEX)

    def _safetensors_files(self, named: Collection[str]) -> list[str]:
        """Files that the index names, in order. Raises UserError for one that is no safetensors file of the model."""
        strange = next((file for file in named if Path(file).name != file or not file.endswith(".safetensors")), None)
        if strange is not None:
            raise UserError(f"{self} has no safetensors file for every tensor of the base ({strange[:80]!r})")
        return sorted(named)

    def weight_files(self) -> list[str]:
        """Names of all files with weights; at most the index is downloaded. Raises UserError."""
        index = None if self._is_one_file_here() else self.fetch(INDEX)
        named = [SINGLE_FILE] if index is None else read_json_object(index).get("weight_map", {}).values()
        return self._safetensors_files({*map(str, named)})

    def shapes(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Name, type and shape of every tensor, from the headers of its files: none of those is downloaded that is not
        here. Raises UserError."""
        from huggingface_hub import HfApi

        for file in self.weight_files():
            path = self.fetch(file) if self.has(file) else None
            if path is not None:
                yield from ((name, place.dtype, place.shape) for name, place in tensor_places(path).items())
                continue
            try:
                header = HfApi().parse_safetensors_file_metadata(self.name, file, revision=self.revision)
            except Exception as error:  # of the library and of its transport: no such file, no rights, no network
                raise UserError(f"{self}: the header of {file} cannot be read: {_first_line(error)}") from error
            yield from ((name, entry.dtype, tuple(entry.shape)) for name, entry in header.tensors.items())

    @property
    def endpoint(self) -> str:
        """Address of the model hub, as this machine's environment says."""
        from huggingface_hub import constants

        return str(constants.ENDPOINT)

    def __str__(self) -> str:
        return f"{HUB_PREFIX}{self.name}" + (f"@{self.revision}" if self.revision else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
