"""The five families, what they learn, and their settings. First weights follow the same rule in all.

How much of a spectrum is noise of the start depends on the size of that noise, so families that began differently could
not be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.digits import digits, shifted
from benchmarks.image_models import Classifier, draw, mixer, resnet, vit
from thinpipe.core.seeds import derive_seed
from thinpipe.data import Batches, Cursor, Tokens
from thinpipe.data.dataset import Windows
from thinpipe.models import GPT2Config, LlamaConfig, Model, build, materialise

SEGMENTS, HEAD_DIM = 4, 32
IMAGES = 896
"""To train on, and as many others."""
Network = Model | Classifier


@dataclass(frozen=True, kw_only=True)
class Options:
    output: Path
    """Where results go, without an ending."""
    data: Path | None = None
    """Folder made by `thinpipe tokenize`. None: draw earlier results again."""
    families: tuple[str, ...] = ("llama", "gpt2", "vit", "mixer", "resnet")
    dim: int = 128
    """Width of the stream; ResNet begins with a quarter of it."""
    depth: int = 1
    """Blocks in each of the four segments."""
    steps: int = 600
    texts: int = 8
    """In a batch."""
    images: int = 64
    """In a batch."""
    seq_len: int = 128
    lr: float = 2e-3
    moments: int = 16
    """How often ranks are taken: first after every step, then ever more rarely."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What there is to learn."""

    rows_at: Callable[[int], Tensor]
    """Ids of the samples of a step, [B, W]; all but the last are read."""
    unseen_BW: Tensor
    labels: slice
    """Which of the ids are to be predicted."""
    vocab_size: int

    def loss(self, logits: Tensor, rows_BW: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), rows_BW[:, self.labels].flatten())


@dataclass(frozen=True, kw_only=True)
class Family:
    title: str
    kind: str
    task: Callable[[Options, Path], Task]
    build: Callable[[Options, Task], Network]


def texts(options: Options, data: Path) -> Task:
    train, unseen = Tokens(data / "train"), Tokens(data / "validation")
    batches = Batches(train, seq_len=options.seq_len, batch_size=options.texts, seed=options.seed)

    def rows_at(step: int) -> Tensor:
        return torch.from_numpy(batches.batch_at(Cursor(samples_seen=step * options.texts)).ids_BW)

    first = np.arange(2 * options.texts, dtype=np.int64)
    unseen_BW = torch.from_numpy(Windows(unseen, options.seq_len).read(first))
    size = train.manifest.vocabulary.size
    return Task(rows_at=rows_at, unseen_BW=unseen_BW, labels=slice(1, None), vocab_size=size)


def images(options: Options, _data: Path) -> Task:
    train_NW, test_NW = digits(IMAGES, IMAGES)

    def rows_at(step: int) -> Tensor:
        """Shifted anew at every step, so that there is something to learn until the end."""
        generator = torch.Generator().manual_seed(derive_seed(options.seed, "images", step))
        chosen = torch.randint(len(train_NW), (options.images,), generator=generator)
        return shifted(train_NW[chosen], options.seed, step)

    unseen_BW = shifted(test_NW[: 4 * options.images], "unseen")
    return Task(rows_at=rows_at, unseen_BW=unseen_BW, labels=slice(-1, None), vocab_size=0)


def _language(config: type[LlamaConfig] | type[GPT2Config], options: Options, task: Task, **more: Any) -> Model:
    settings = config(
        vocab_size=task.vocab_size,
        dim=options.dim,
        n_layers=SEGMENTS * options.depth,
        n_heads=options.dim // HEAD_DIM,
        max_seq_len=options.seq_len,
        boundaries=tuple(options.depth * cut for cut in range(1, SEGMENTS)),
        **more,
    )
    return materialise(build(settings), seed=options.seed)


def _llama(options: Options, task: Task) -> Model:
    hidden_dim = -(-8 * options.dim // 3 // 32) * 32
    return _language(LlamaConfig, options, task, n_kv_heads=options.dim // HEAD_DIM, hidden_dim=hidden_dim)


def _gpt2(options: Options, task: Task) -> Model:
    return _language(GPT2Config, options, task)


def _drawn(model: Classifier, options: Options) -> Classifier:
    draw(model, options.seed)
    return model


def _vit(options: Options, _task: Task) -> Classifier:
    return _drawn(vit(options.dim, options.dim // HEAD_DIM, SEGMENTS, options.depth), options)


def _mixer(options: Options, _task: Task) -> Classifier:
    return _drawn(mixer(options.dim, SEGMENTS, options.depth), options)


def _resnet(options: Options, _task: Task) -> Classifier:
    widths = (options.dim // 4, options.dim // 2, options.dim, options.dim)
    return _drawn(resnet(widths, (1, 2, 1, 2), options.depth), options)


FAMILIES = {
    "llama": Family(title="Llama", kind="transformer, text", task=texts, build=_llama),
    "gpt2": Family(title="GPT-2", kind="transformer, text", task=texts, build=_gpt2),
    "vit": Family(title="ViT", kind="transformer, images", task=images, build=_vit),
    "mixer": Family(title="MLP-Mixer", kind="no attention, images", task=images, build=_mixer),
    "resnet": Family(title="ResNet", kind="convolutions, images", task=images, build=_resnet),
}
