"""Settings: every mistake gets a sentence that says what to write instead."""

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

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
