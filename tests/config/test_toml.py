"""Settings: every mistake gets a sentence that says what to write instead."""

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from thinpipe.cli.parsing import parse
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Inner:
    steps: int = 5
    kind: Literal["a", "b"] = "a"
    where: Path = Path("x")
    cuts: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.steps < 0:
            raise UserError("inner.steps must not be negative")


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    rate: float = 0.5


def load(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load_toml(file, Outer)


def test_values_defaults_and_a_round_trip(tmp_path):
    config = load(tmp_path, 'rate = 1\n[inner]\nkind = "b"\nwhere = "/y"\ncuts = [1, 2]\n')
    assert config == Outer(rate=1.0, inner=Inner(kind="b", where=Path("/y"), cuts=(1, 2)))
    assert load(tmp_path, dump_toml(config)) == config
    assert load(tmp_path, "") == Outer()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[inner]\nstesp = 3", r"unknown key inner.stesp: did you mean inner.steps\?"),
        ("[iner]\nsteps = 3", r"unknown key iner: did you mean inner\?"),
        ("zzz = 1", r"unknown key zzz: there are: inner, rate"),
        ('[inner]\nsteps = "many"', r"inner.steps: expected int, got str"),
        ('[inner]\nkind = "c"', r"inner.kind: invalid enum value 'c': write one of 'a', 'b'$"),
        ("[inner]\nkind = true", r"inner.kind: expected str, got bool: write one of 'a', 'b'$"),
        ("[inner]\nsteps = -1", r"run.toml: inner.steps must not be negative"),
        ("[inner", r"not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*nothing.toml"):
        load_toml(tmp_path / "nothing.toml", Outer)
    with pytest.raises(UserError, match="is a folder, and a TOML file is wanted"):
        load_toml(tmp_path, Outer)


def test_every_optional_setting_of_a_run_is_none_by_default():
    """TOML cannot say None, so a saved run could not say it either."""

    def check(config_type):
        hints = typing.get_type_hints(config_type)
        for setting in dataclasses.fields(config_type):
            if dataclasses.is_dataclass(hints[setting.name]):
                check(hints[setting.name])
            elif type(None) in typing.get_args(hints[setting.name]):
                assert setting.default is None, f"{config_type.__name__}.{setting.name}"

    check(RunConfig)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("[training]\nsteps = 5\n[lr_scheduler]\nwarmup_steps = 40", ["--lr-scheduler.warmup-steps", "1"]),
        ("[training]\nsteps = 5", ["--lr-scheduler.warmup-steps=1"]),
        ("[optimizer]\nlr = -1", ["--optimizer.lr", "1e-3"]),
        ('[training]\nsteps = "many"', ["--training.steps", "400"]),
        ('[boundary]\nforward = "int9"', ["--boundary.forward", "int8"]),
        ('[debug]\ndeterministic = "yes"', ["--debug.no-deterministic"]),
        ('[model]\nhf = "base"\n[lora]\nr = 0', ["--lora.r", "8"]),
        ('[model]\nhf = "base"', ["--lora.r", "8"]),  # there is no such section in the file
        ('[model]\nhf = "base"\nboundaries = [1]', ["--boundary.backward", "bf16"]),  # where the default is a preset
    ],
)
def test_a_flag_beats_the_file_before_anything_is_checked(text, flags, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    _, config = parse(["train", str(path), *flags])
    assert isinstance(config, RunConfig)
    config.__post_init__()
    (flag, *_) = flags
    if flag == "--lora.r":
        assert config.lora == LoraConfig(r=8)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[training]\nsteps = 5\n[lr_scheduler]\nwarmup_steps = 40", "warmup_steps 40 must be below"),
        ('[training]\nsteps = "many"', "run.toml: training.steps: expected int, got str"),
        ("[model]\nboundaries = [1, true]", r"run.toml: model.boundaries\[1\]: expected int"),
        ('[boundary]\nforward = "int9"', "run.toml: boundary.forward: .*write one of 'fp32', 'bf16'"),
    ],
)
def test_what_no_flag_mends_is_refused(text, says, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        parse(["train", str(path), "--job.dump-folder", "elsewhere"])
