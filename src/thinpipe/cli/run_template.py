"""Text of the settings file and the machines file that `thinpipe new` writes: only what matters, with a comment where a
value is a guess."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinpipe.cli.chat_lengths import ChatLengths
from thinpipe.config.families import PRESETS
from thinpipe.config.parameter_shapes import named_parameters

Where = Literal["alone", "lan", "friends"]
_LINKS: dict[Where, tuple[str, str, str]] = {
    "lan": ("1gbps", "1gbps", "0.2ms"),
    "friends": ("20mbps", "80mbps", "20ms"),
}
"""Uplink, downlink and one-way latency that are written for each machine."""
_RATES = ((128, "3e-3"), (256, "1.5e-3"), (1024, "6e-4"))
"""Learning rates up to a width; `_WIDE_RATE` above."""
_WIDE_RATE, _LORA_RATE = "3e-4", "2e-4"
_STEPS, _TUNING_STEPS, _LEAST_STEPS, _WARMUP_SHARE = 1000, 200, 20, 20
_BATCH, _TUNING_BATCH, _TOKENS = 16, 8, 512
_PASSES, _TOKENS_STEP, _FEW_CHATS = 3, 32, 100
"""How often chats are read, what the length of a sequence is a multiple of, and below how many chats a fifth of them is
held out, not a tenth: a validation loss needs a batch."""
_KEEL_SHARE = 58 / 256
"""Channels of a keel as a share of the width: 16 times fewer bytes than bf16 (docs/concepts/keel.md)."""
_TOKENS_A_WEIGHT = 20


@dataclass(frozen=True)
class RunWanted:
    """What was answered or given by flags."""

    name: str
    model: str
    is_tuning: bool
    n_layers: int
    data: Path
    """Folder of tokens."""
    where: Where
    machines: int
    chats: ChatLengths | None = None
    """What to tune on, if that is chats that could be read."""

    @property
    def seq_len(self) -> int:
        """What the longest chat needs: a row is one chat and padding, and padding costs what a token costs."""
        if self.chats is None:
            return _TOKENS
        return min(_TOKENS, math.ceil(self.chats.longest / _TOKENS_STEP) * _TOKENS_STEP)

    @property
    def batch(self) -> int:
        return _TUNING_BATCH if self.is_tuning else _BATCH

    @property
    def validation_fraction(self) -> float:
        return 0.2 if self.chats is not None and self.chats.is_all and self.chats.chats < _FEW_CHATS else 0.1

    @property
    def boundaries(self) -> list[int]:
        """A segment for each machine, as equal as possible."""
        return [round(self.n_layers * cut / self.machines) for cut in range(1, self.machines)]


def settings_text(wanted: RunWanted) -> str:
    parts = [
        f'[job]\ndump_folder = "runs/{wanted.name}"',
        f'[data]\npath = "{wanted.data.as_posix()}"',
        _model_to_tune(wanted) if wanted.is_tuning else _new_model(wanted),
        _training(wanted),
    ]
    if wanted.machines > 1:
        micro = max(1, wanted.batch // (2 * wanted.machines))
        parts.append(f"[parallelism]\npipeline_parallel_microbatch_size = {micro}   # sequences that travel together")
    if wanted.machines > 1 and not wanted.is_tuning:
        numbers = "int4" if wanted.where == "friends" else "int8"
        parts.append(f'[boundary]\nforward = "{numbers}"\nbackward = "{numbers}"')
    title = f"Written by `thinpipe new`. Every key: thinpipe {_verb(wanted)} --help-all"
    return "\n\n".join([f"# {title}", *parts]) + "\n"


def machines_text(wanted: RunWanted, machines: Sequence["MachineWanted"]) -> str:
    up, down, latency = _LINKS[wanted.where]
    text = (
        "# Machines of this run, for `thinpipe plan`. Links are guesses: write what a speed test shows at each place;\n"
    )
    text += "# latency is half of what ping shows.\n"
    if wanted.where == "friends":
        text += f'\n[hub]   # the machine that relays all messages\nup = "{up}"\ndown = "{down}"\n'
    for machine in machines:
        text += f'\n[[machine]]\nname = "{machine.name}"\n{machine.speed}\n'
        text += f'up = "{up}"\ndown = "{down}"\nlatency = "{latency}"\n'
    return text


@dataclass(frozen=True)
class MachineWanted:
    name: str
    speed: str
    """Keys of a machines file that say how fast it is and how much memory it has."""


def next_commands(wanted: RunWanted, file: Path, sources: str | None) -> list[str]:
    """What to type next; `sources`: text that is no tokens yet."""
    commands, after = [], []
    chats = ""
    if sources is not None:
        chats = " --chat" if is_chats(sources) and wanted.is_tuning else ""
        vocabulary = f" --tokenizer {wanted.model}" if wanted.is_tuning else f" --vocab-size {_vocabulary(wanted)}"
        length = f" --seq-len {wanted.seq_len} --validation-fraction {wanted.validation_fraction:g}" if chats else ""
        commands.append(f"thinpipe tokenize --sources {sources}{chats}{vocabulary}{length} --output {wanted.data}")
    hub = f" --hub.peers {wanted.machines}" if wanted.machines > 1 else ""
    if wanted.is_tuning:
        question = "--validation-chats 2" if chats else '--prompt "Once upon a time"'
        after = [
            f"thinpipe generate runs/{wanted.name} {question}",
            f"thinpipe export runs/{wanted.name} {wanted.name}-adapter",
        ]
    return [*commands, f"thinpipe {_verb(wanted)} {file}{hub}", *after]


def is_chats(sources: str) -> bool:
    """Whether files to tune on are chats, by their names."""
    return sources.endswith((".jsonl", ".json"))


def _verb(wanted: RunWanted) -> str:
    return "train" if wanted.machines == 1 else "hub"


def _vocabulary(wanted: RunWanted) -> int:
    return PRESETS[wanted.model].vocab_size


def _model_to_tune(wanted: RunWanted) -> str:
    lines = ["[model]", f'hf = "{wanted.model}"']
    if wanted.boundaries:
        lines.append(f"boundaries = {wanted.boundaries}   # {wanted.machines} segments, one for each machine")
    lines.append('# quantize_base = "nf4"   # frozen weights in 4 bits (extra qlora): a quarter of the memory')
    return "\n".join(
        [*lines, "", "[lora]   # without this section all weights are trained", "r = 16", "lora_alpha = 32"]
    )


def _new_model(wanted: RunWanted) -> str:
    model = PRESETS[wanted.model]
    lines = ["[model]", f'preset = "{wanted.model}"']
    if wanted.boundaries:
        lines.append(f"boundaries = {wanted.boundaries}   # {wanted.machines} segments, one for each machine")
        if model.tied:
            lines.append("tied = false   # embedding and output head are on different machines")
    if wanted.where == "friends":
        rank = model.dim // wanted.machines
        lines += [
            "",
            "[model.projection]   # the keel: 16 times fewer bytes than bf16 over each link (docs/concepts/keel.md)",
            f"width = {round(_KEEL_SHARE * model.dim)}",
            f"token_prior_rank = {rank}",
            "token_prior_window = 4",
            *([] if model.has_position_table else [f"embedding_rank = {rank}"]),
        ]
    return "\n".join(lines)


def _training(wanted: RunWanted) -> str:
    if wanted.is_tuning:
        rate, steps, note = _LORA_RATE, _TUNING_STEPS, ""
        batch, tokens = wanted.batch, wanted.seq_len
        if wanted.chats is not None and wanted.chats.is_all:
            trained = wanted.chats.chats * (1 - wanted.validation_fraction)
            steps = max(_LEAST_STEPS, math.ceil(_PASSES * trained / batch))
            note = f"   # {_PASSES} times through the chats" if steps > _LEAST_STEPS else ""
    else:
        model = PRESETS[wanted.model]
        rate = next((rate for width, rate in _RATES if model.dim <= width), _WIDE_RATE)
        steps, batch, tokens = _STEPS, _BATCH, min(_TOKENS, model.max_seq_len)
        weights = sum(parameter.numel for parameter in named_parameters(model).values())
        whole = round(_TOKENS_A_WEIGHT * weights / (batch * tokens), -2)
        note = f"   # {_TOKENS_A_WEIGHT} tokens a weight would be {whole:,.0f}"
    return textwrap.dedent(
        f"""\
        [training]
        steps = {steps}{note}
        global_batch_size = {batch}
        seq_len = {tokens}

        [optimizer]
        lr = {rate}   # a usual start at this size, not tuned

        [lr_scheduler]
        warmup_steps = {max(1, steps // _WARMUP_SHARE)}"""
    )
