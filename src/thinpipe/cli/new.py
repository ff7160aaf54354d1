"""`thinpipe new`: asks what no flag says, writes a short settings file and plans it at once."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from rich.console import Console
from rich.prompt import Prompt

from thinpipe.api.planning import model_to_plan
from thinpipe.api.this_machine import HERE, this_machine
from thinpipe.cli import plan
from thinpipe.cli.chat_lengths import ChatLengths, chat_lengths
from thinpipe.cli.run_template import (
    MachineWanted,
    RunWanted,
    Where,
    is_chats,
    machines_text,
    next_commands,
    settings_text,
)
from thinpipe.config.commands import NewConfig
from thinpipe.config.data import is_huggingface
from thinpipe.config.families import PRESETS
from thinpipe.config.plan import PlanConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.data import has_tokens, open_sources
from thinpipe.planning.devices import DEVICES, find_device

_MEMORY_OF_A_COMPUTER = "12GB"
"""Written for a device whose memory varies, with a comment that says so."""
_TOKENS = "tokens"
_GOALS: tuple[Literal["pretrain", "tune"], ...] = ("pretrain", "tune")
_PRETRAIN, _TUNE = _GOALS
Choice = TypeVar("Choice", bound=str)
_WHERE: tuple[Where, ...] = ("alone", "lan", "friends")


def run(config: NewConfig) -> None:
    machines_file = config.file.with_name(f"{config.file.stem}.machines.toml")
    for path in (config.file, machines_file):
        if path.exists() and not config.overwrite:
            raise UserError(f"{path} is there already: name another file, or pass --overwrite")
    config = _ask_for_the_rest(config)
    assert config.model is not None
    assert config.data is not None
    assert config.where is not None
    devices = _devices(config.where, config.machines)
    tokens = Path(config.data) if has_tokens(Path(config.data) / "train") else None
    wanted = RunWanted(
        name=config.file.stem,
        model=config.model,
        is_tuning=config.goal == _TUNE,
        n_layers=_n_layers(config),
        data=tokens or Path(f"{config.file.stem}-{_TOKENS}" if config.goal == _TUNE else _TOKENS),
        where=config.where,
        machines=len(devices),
        chats=None if tokens else _chats(config),
    )
    if len(devices) > wanted.n_layers:
        raise UserError(
            f"{wanted.model} has {wanted.n_layers} blocks: name at most as many machines, or a larger model"
        )
    console = Console(highlight=False, markup=False)
    _write(config.file, settings_text(wanted))
    known: Path = Path(HERE)
    settings = load_toml(config.file, PlanConfig)
    if config.where != "alone":
        known = machines_file
        _write(known, machines_text(wanted, _machines(devices, settings)))
    console.print(f"wrote {config.file}" + (f" and {known}" if config.where != "alone" else ""), soft_wrap=True)
    if wanted.chats is not None:
        count = f"{wanted.chats.chats:,} chats" if wanted.chats.is_all else f"the first {wanted.chats.chats:,} chats"
        cut = ", longer ones are cut" if wanted.chats.longest > wanted.seq_len else ""
        console.print(
            f"{config.data}: {count}, the longest of {wanted.chats.longest:,} tokens: seq_len = {wanted.seq_len}{cut}",
            soft_wrap=True,
        )
    console.print("plan:", style="bold")
    plan.run(replace(settings, machines=known))
    console.print("next:", style="bold")
    for command in next_commands(wanted, config.file, None if tokens else config.data):
        console.print(f"  {command}", soft_wrap=True)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


def _ask_for_the_rest(config: NewConfig) -> NewConfig:
    """Raises UserError, with the flags that are missing, where nobody can be asked."""
    needed = ["goal", "model", "data", "where"]
    missing = [name for name in needed if getattr(config, name) is None]
    if missing and not sys.stdin.isatty():
        flags = {
            "goal": f"--goal {_PRETRAIN} or {_TUNE}",
            "model": f"--model, one of {', '.join(PRESETS)}, or what to tune: a folder or hf:NAME",
            "data": "--data with files of text or chats, or sample:train",
            "where": f"--where {', '.join(_WHERE)}",
        }
        raise UserError("nobody can be asked here, so pass " + "; ".join(flags[name] for name in missing))
    goal = config.goal or _choose("Train a new model, or tune one that there is?", _GOALS)
    model = config.model or (
        _choose("Size of the model?", tuple(PRESETS), "llama-10m")
        if goal == _PRETRAIN
        else Prompt.ask("Which model? A folder, or hf:NAME of the Hugging Face hub")
    )
    data = config.data or Prompt.ask("Your text or chats? Files, a folder, or sample:train", default="sample:train")
    where = config.where or _choose("Where: on this machine, on a fast network, or with friends?", _WHERE)
    machines = config.machines
    if where != "alone" and not machines and sys.stdin.isatty():
        said = Prompt.ask(f"The machines, with commas: {HERE}, or a device such as RTX 3060", default=f"{HERE}, {HERE}")
        machines = tuple(part.strip() for part in said.split(","))
    return replace(config, goal=goal, model=model, data=data, where=where, machines=machines)


def _choose(question: str, choices: tuple[Choice, ...], default: Choice | None = None) -> Choice:
    answer = Prompt.ask(question, choices=list(choices), default=default or choices[0])
    return next(choice for choice in choices if choice == answer)


def _devices(where: Where, named: Sequence[str]) -> list[str]:
    """A device for each machine: this one, or those that are named. Raises UserError."""
    if where == "alone":
        if named:
            raise UserError("--machines is for --where lan and friends: leave it out")
        return [HERE]
    if len(named) < 2:
        raise UserError(f'--where {where} needs two machines or more: --machines {HERE} "RTX 3060"')
    return [name if name == HERE else find_device(name)[0] for name in named]


def _chats(config: NewConfig) -> ChatLengths | None:
    """Chats to tune on, if they and the model's tokenizer are on this disk. Raises DataError."""
    assert config.data is not None
    assert config.model is not None
    if config.goal != _TUNE or is_huggingface(config.data) or not is_chats(config.data):
        return None
    chats = open_sources((config.data,), chats=True)
    if not (Path(config.model) / "tokenizer.json").is_file():
        return None
    found = chat_lengths(chats, Path(config.model))
    return found if found.chats else None


def _n_layers(config: NewConfig) -> int:
    """Blocks of the model. Raises UserError if it is not known."""
    assert config.model is not None
    if config.goal == _PRETRAIN:
        if config.model not in PRESETS:
            raise UserError(f"--model {config.model}: to train from the beginning, name one of {', '.join(PRESETS)}")
        return PRESETS[config.model].n_layers
    from thinpipe.models.hf.base_files import pinned_source
    from thinpipe.models.hf.config import CONFIG, read_json_object

    stored = read_json_object(pinned_source(config.model)[1] / CONFIG)
    stored = stored.get("text_config", stored)
    n_layers = stored.get("num_hidden_layers", stored.get("n_layer"))
    if not isinstance(n_layers, int):
        raise UserError(f"{config.model}: its {CONFIG} does not say how many blocks it has (num_hidden_layers)")
    return n_layers


def _machines(devices: Sequence[str], settings: RunConfig) -> list[MachineWanted]:
    speed_here = _speed_here(settings) if HERE in devices else ""
    return [
        MachineWanted(f"machine-{index}", speed_here if device == HERE else _speed(device))
        for index, device in enumerate(devices, 1)
    ]


def _speed(device: str) -> str:
    line = f'device = "{device}"'
    if DEVICES[device].memory_gb is None:
        line += f'\nmemory = "{_MEMORY_OF_A_COMPUTER}"   # a guess'
    return line


def _speed_here(settings: RunConfig) -> str:
    """Of this machine, measured now."""
    here = this_machine(settings, model_to_plan(settings, None)[0]).machines[0]
    memory = f'memory = "{here.memory_nbytes / 1e9:.1f}GB"   # free now'
    return f"tflops = {here.flops / 1e12:.3g}   # this machine, measured now\n{memory}"
