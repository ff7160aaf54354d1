"""Dense models from and to Hugging Face folders: config.json beside safetensors files, whole or in shards.

A part reads only the tensors it needs, so a peer needs only the shards that hold its layers. Pickled weights (.bin)
are never opened, and transformers is not imported. A subspace model has to be folded into a dense one first, which
does not happen here; one with necks is saved by `huggingface_neck`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from thinpipe.core.errors import UserError
from thinpipe.models.config import GPT2Config, LlamaConfig, ModelConfig
from thinpipe.models.huggingface_config import load_config, read_object, stored_config
from thinpipe.models.model import Model, Segment

__all__ = ["load_config", "load_weights", "save"]

WHOLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model*.bin"
HEAD = "last.lm_head.weight"
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Names:
    """What Hugging Face calls our parameters; read from left to right to load as well as to save."""

    embedding: str
    """Ours, of the table that a tied head shares."""
    base: str
    """Files saved without a head, and some old ones, leave this out."""
    beginnings: dict[str, str]
    """Of names, ours and theirs; the rest of a name is the same."""
    transposed: tuple[str, ...] = ()
    """Ends of the names of matrices that are stored inputs x outputs (Conv1D)."""

    def stored(self, name: str) -> str:
        ours = next(beginning for beginning in self.beginnings if name.startswith(beginning))
        return self.beginnings[ours] + name.removeprefix(ours)

    def turn(self, name: str, tensor: Tensor) -> Tensor:
        """Our layout to theirs; being a transposition, theirs to ours too."""
        return tensor.T if name.endswith(self.transposed) else tensor


NAMES: dict[type[ModelConfig], Names] = {
    LlamaConfig: Names(
        embedding="first.embed_tokens.weight",
        base="model.",
        beginnings={
            "first.embed_tokens.": "model.embed_tokens.",
            "blocks.": "model.layers.",
            "last.norm.": "model.norm.",
            "last.lm_head.": "lm_head.",
        },
    ),
    GPT2Config: Names(
        embedding="first.wte.weight",
        base="transformer.",
        beginnings={
            "first.wte.": "transformer.wte.",
            "first.wpe.": "transformer.wpe.",
            "blocks.": "transformer.h.",
            "last.ln_f.": "transformer.ln_f.",
            "last.lm_head.": "lm_head.",
        },
        transposed=("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
    ),
}


class StoredTensors:
    """The tensors of a folder by name. A file is opened when the first of its tensors is read."""

    def __init__(self, folder: Path, base: str) -> None:
        self.folder, self._base = folder, base
        self._opened: dict[str, Any] = {}
        self._file_of: dict[str, str]
        if (folder / WHOLE).is_file():
            self._file_of = dict.fromkeys(self._open(WHOLE).keys(), WHOLE)
        elif (folder / INDEX).is_file():
            self._file_of = read_object(folder / INDEX).get("weight_map", {})
        elif pickled := sorted(path.name for path in folder.glob(PICKLED)):
            raise UserError(
                f"{folder} has weights only in {pickled[0]}, a pickle, and opening one can run code: if you trust it, "
                "convert it with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        else:
            raise UserError(f"{folder} has neither {WHOLE} nor {INDEX}: download the weights as well")

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

    def _key(self, name: str) -> str:
        return name if name in self._file_of else name.removeprefix(self._base)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            # The index came with the weights: it may not name files elsewhere on this computer.
            if Path(file).name != file or not (self.folder / file).is_file():
                raise UserError(f"{self.folder} has no file {file}, which its index names: download it as well")
            try:
                self._opened[file] = safe_open(self.folder / file, framework="pt")
            except SafetensorError as error:
                raise UserError(f"{self.folder / file} is not whole ({error}): download it again") from error
        return self._opened[file]


@torch.no_grad()
def load_weights(part: Model | Segment, folder: str | Path) -> None:
    """Copies weights from a folder into a part that has memory, in the part's dtype and on its device.

    The head of an untied part gets a copy of the embedding if the folder ties the two: a cut model cannot be tied.
    """
    folder = Path(folder)
    names = _names_of_dense(part, "load the weights into a dense model")
    config = load_config(folder)
    _require_same_layers(part.config, config, folder)
    stored = StoredTensors(folder, names.base)
    head, embedding = names.stored(HEAD), names.stored(names.embedding)
    if part.config.tied and head in stored and not torch.equal(stored.read(head), stored.read(embedding)):
        raise UserError(f"{folder}: {head} differs from {embedding}, but the model is tied: set tied = false")
    for name, parameter in part.named_parameters():
        wanted = names.stored(name)
        if name == HEAD and config.tied and head not in stored:
            wanted = embedding
        tensor = names.turn(name, stored.read(wanted))
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

    Weights beyond `max_shard_bytes` become several files and an index. Hugging Face knows no boundaries, so they are
    not kept; the tokenizer's files are yours to add, and `end_of_text_id` is the id at which generating stops.
    """
    names = _names_of_dense(model, "fold it into a dense model first")
    write_folder(model, Path(folder), names, stored_config(model.config, end_of_text_id), max_shard_bytes)


def write_folder(model: Model, folder: Path, names: Names, config: dict[str, Any], max_shard_bytes: int) -> None:
    """Weights under these names, and the content of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if old := sorted(path.name for pattern in ("model*.safetensors", INDEX, PICKLED) for path in folder.glob(pattern)):
        # Whoever loads the folder might take the old weights: a whole file is preferred to an index.
        raise UserError(f"{folder} already has weights ({old[0]}): choose another folder, or remove them")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _write_tensors(parameters, names, folder, max_shard_bytes)
    dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    # Written last: a folder that was cut short has no config.json and cannot be taken for a model.
    _write_json(folder / "config.json", {**config, "torch_dtype": dtype})


def _write_tensors(parameters: dict[str, Tensor], names: Names, folder: Path, max_shard_bytes: int) -> None:
    nbytes = {name: parameter.nbytes for name, parameter in parameters.items()}
    shards = _shards(nbytes, max_shard_bytes)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WHOLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # One shard at a time: a model on a GPU or with transposed weights needs no second copy of itself here.
        tensors = {names.stored(name): names.turn(name, parameters[name].cpu()).contiguous() for name in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": file_of})


def _names_of_dense(part: Model | Segment, remedy: str) -> Names:
    if part.config.subspace.width is not None:
        raise TypeError(f"Hugging Face folders hold dense models and this is a subspace model: {remedy}")
    if part.config.has_neck:
        raise TypeError("Hugging Face folders hold dense models and this one has a neck: see huggingface_neck.save")
    if any(parameter.is_meta for parameter in part.parameters()):
        raise ValueError("the model has no memory yet: call materialise(...) first, with draw=False before loading")
    return NAMES[type(part.config)]


def _require_same_layers(ours: ModelConfig, theirs: ModelConfig, folder: Path) -> None:
    """Compares what shapes do not show: a wrong number of heads, or the first few of many layers, would load."""
    if type(ours) is not type(theirs):
        raise UserError(
            f"{folder} needs a {type(theirs).__name__}, not a {type(ours).__name__}: use load_config(folder)"
        )
    for field in ("n_layers", "n_heads", "n_kv_heads"):
        if (here := getattr(ours, field, None)) != (there := getattr(theirs, field, None)):
            raise UserError(f"{folder} has {field} = {there}, the model {here}: build it from load_config(folder)")


def _shards(nbytes: dict[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names in order, cut so that no shard is larger than the limit unless a single tensor is."""
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
