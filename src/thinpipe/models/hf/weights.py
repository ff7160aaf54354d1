"""Loads and saves dense models as Hugging Face folders: config.json and safetensors files, single or sharded.

Pickled weights (.bin) are never opened, and transformers is not imported. Convert a subspace model with `to_dense`
first; a model with a boundary projection is saved by `models.hf.projection`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from thinpipe.config.model import ModelConfig
from thinpipe.config.model_family import FamilySpec
from thinpipe.core.errors import UserError
from thinpipe.core.safetensors_header import TensorPlace, tensor_nbytes, tensor_places
from thinpipe.models.hf.config import CONFIG, INDEX, SINGLE_FILE, hf_config, load_config, read_json_object
from thinpipe.models.model import Model

__all__ = ["load_config", "load_weights", "save"]

PICKLE_FILES = "pytorch_model*.bin"
HEAD = "last.lm_head.weight"
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ParameterNames:
    """Mapping of thinpipe's parameter names to Hugging Face's, for loading and saving."""

    embedding: str
    """thinpipe's name of the embedding that a tied head shares."""
    base: str
    """Prefix of Hugging Face names that is missing in files saved without a head, and in some old files."""
    prefixes: dict[str, str]
    """thinpipe's prefix -> Hugging Face's prefix; the rest of a name is the same."""
    transposed: tuple[str, ...] = ()
    """Suffixes of thinpipe's names of matrices that Hugging Face stores as inputs x outputs (Conv1D)."""

    def stored(self, name: str) -> str:
        """Hugging Face's name of a parameter."""
        ours = next(prefix for prefix in self.prefixes if name.startswith(prefix))
        return self.prefixes[ours] + name.removeprefix(ours)

    def to_hf_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Converts a tensor to Hugging Face's layout; also the inverse conversion, as it is at most a transposition."""
        return tensor.T if name.endswith(self.transposed) else tensor


def parameter_names(spec: FamilySpec) -> ParameterNames:
    """Names of a dense model of this family."""
    stored, base = spec.huggingface, spec.huggingface.base
    kept = [f"first.{spec.token_embedding}.", f"last.{spec.final_norm}."]
    if spec.position_embedding is not None:
        kept.append(f"first.{spec.position_embedding}.")
    return ParameterNames(
        embedding=f"first.{spec.token_embedding}.weight",
        base=base,
        prefixes={
            **{ours: base + ours.partition(".")[2] for ours in kept},
            "blocks.": base + stored.blocks,
            "last.lm_head.": "lm_head.",
        },
        transposed=stored.transposed,
    )


class StoredTensors:
    """Tensors of a folder by name. Files are opened lazily; pickled weights and path traversal are rejected."""

    def __init__(self, folder: Path, base: str) -> None:
        self.folder, self._base = folder, base
        self._opened: dict[str, Any] = {}
        self._file_of: dict[str, str]
        if (folder / SINGLE_FILE).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        elif (folder / INDEX).is_file():
            self._file_of = read_json_object(folder / INDEX).get("weight_map", {})
        elif pickled := sorted(path.name for path in folder.glob(PICKLE_FILES)):
            raise UserError(
                f"{folder} has weights only in {pickled[0]}, a pickle, and opening one can run code: if you trust it, "
                "convert it with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        else:
            raise UserError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}: download the weights as well")

    @property
    def names(self) -> list[str]:
        """Stored names of all tensors."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return self._key(name) in self._file_of

    def read(self, name: str) -> Tensor:
        if name not in self:
            raise UserError(
                f"{self.folder} has no tensor {name}: use a folder with a whole causal language model, head included"
            )
        key = self._key(name)
        try:
            tensor: Tensor = self._open(self._file_of[key]).get_tensor(key)
        except SafetensorError as error:
            path = self.folder / self._file_of[key]
            raise UserError(f"cannot read {key} from {path} ({error}): download the folder again") from error
        return tensor

    def has_file(self, name: str) -> bool:
        """Whether the file with this tensor is there."""
        return name in self and (self.folder / Path(self._file_of[self._key(name)]).name).is_file()

    def places(self) -> dict[str, TensorPlace]:
        """Where each tensor lies, by stored name. Every file is opened. Raises UserError."""
        found: dict[str, TensorPlace] = {}
        for file in sorted(set(self._file_of.values())):
            self._open(file)
            found |= {name: place for name, place in tensor_places(self.folder / file).items() if name in self._file_of}
        return found

    def nbytes(self, name: str) -> int:
        """Size of a tensor, which is not read."""
        key = self._key(name)
        found = self._open(self._file_of[key]).get_slice(key)
        return tensor_nbytes(found.get_dtype(), tuple(found.get_shape()))

    def _key(self, name: str) -> str:
        return name if name in self._file_of else name.removeprefix(self._base)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            # The index is untrusted: reject path traversal.
            if Path(file).name != file or not (self.folder / file).is_file():
                raise UserError(f"{self.folder} has no file {file}, which its index names: download it as well")
            try:
                self._opened[file] = safe_open(self.folder / file, framework="pt")
            except SafetensorError as error:
                raise UserError(f"{self.folder / file} is not whole ({error}): download it again") from error
        return self._opened[file]


@torch.no_grad()
def load_weights(model: Model, folder: str | Path) -> None:
    """Copies weights from a folder into a materialised model of its configuration (`load_config`), in the model's dtype
    and on its device. Raises UserError if the folder does not fit the model."""
    folder = Path(folder)
    names = _names_of_dense(model, "load the weights into a dense model")
    _require_same_layers(model.config, load_config(folder), folder)
    stored = StoredTensors(folder, names.base)
    head, embedding = names.stored(HEAD), names.stored(names.embedding)
    if model.config.tied and head in stored and not torch.equal(stored.read(head), stored.read(embedding)):
        raise UserError(f"{folder}: {head} differs from {embedding}, but the model is tied: set tied = false")
    for name, parameter in model.named_parameters():
        wanted = names.stored(name)
        tensor = names.to_hf_layout(name, stored.read(wanted))
        if tensor.shape != parameter.shape:
            raise UserError(
                f"{folder}: {wanted} is {tuple(tensor.shape)}, but {name} is {tuple(parameter.shape)}: "
                "build the model from load_config(folder)"
            )
        parameter.copy_(tensor)


def save(
    model: Model, folder: str | Path, max_shard_bytes: int = SHARD_BYTES, end_of_text_id: int | None = None
) -> None:
    """Writes a dense model as a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Weights larger than `max_shard_bytes` are split into several files with an index. Boundaries are not saved, as
    Hugging Face has none. The tokenizer's files are not written; `end_of_text_id` is the id at which generation stops.
    """
    names = _names_of_dense(model, "convert it with to_dense first")
    write_folder(model, Path(folder), names, hf_config(model.config, end_of_text_id), max_shard_bytes)


def write_folder(
    model: Model, folder: Path, names: ParameterNames, config: dict[str, Any], max_shard_bytes: int
) -> None:
    """Writes the weights under Hugging Face's `names`, then `config` as config.json. Raises UserError if the folder
    already has weights."""
    folder.mkdir(parents=True, exist_ok=True)
    if old := sorted(
        path.name for pattern in ("model*.safetensors", INDEX, PICKLE_FILES) for path in folder.glob(pattern)
    ):
        # transformers might load the old weights, as it prefers a single file to an index.
        raise UserError(f"{folder} already has weights ({old[0]}): choose another folder, or remove them")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _write_tensors(parameters, names, folder, max_shard_bytes)
    dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    # Written last: an incomplete folder has no config.json and does not load.
    _write_json(folder / CONFIG, {**config, "torch_dtype": dtype})


def _write_tensors(parameters: dict[str, Tensor], names: ParameterNames, folder: Path, max_shard_bytes: int) -> None:
    nbytes = {name: parameter.nbytes for name, parameter in parameters.items()}
    shards = _shards(nbytes, max_shard_bytes)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # One shard at a time, to avoid a second copy of a model on a GPU or with transposed weights.
        tensors = {names.stored(name): names.to_hf_layout(name, parameters[name].cpu()).contiguous() for name in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": file_of})


def _names_of_dense(model: Model, remedy: str) -> ParameterNames:
    if model.config.subspace.width is not None:
        raise TypeError(f"Hugging Face folders hold dense models and this is a subspace model: {remedy}")
    if model.config.has_projection:
        raise TypeError(
            "Hugging Face folders hold dense models and this one has a boundary projection: use "
            "`models.hf.projection.save`"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model has no memory yet: call materialise(...) first, with draw=False before loading")
    return parameter_names(model.config.spec)


def _require_same_layers(ours: ModelConfig, theirs: ModelConfig, folder: Path) -> None:
    """Compares fields that shapes do not reveal: weights would load with a wrong number of heads or fewer layers."""
    if type(ours) is not type(theirs):
        raise UserError(
            f"{folder} needs a {type(theirs).__name__}, not a {type(ours).__name__}: use load_config(folder)"
        )
    for field in ("n_layers", "n_heads", "n_kv_heads"):
        if (here := getattr(ours, field, None)) != (there := getattr(theirs, field, None)):
            raise UserError(f"{folder} has {field} = {there}, the model {here}: build it from load_config(folder)")


def _shards(nbytes: dict[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Splits the names, in order, into shards of at most `max_shard_bytes`, unless a single tensor is larger."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in nbytes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
