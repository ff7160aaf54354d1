"""Who computes other numbers is told what each side has and what to do, in one sentence."""

import msgspec
import pytest

import thinpipe
from thinpipe.core.numerics import NUMERICS_VERSION, Numerics, numerics, numerics_mismatch

HUB = Numerics(version=3, torch="2.13.0")


def test_what_is_compared_is_the_version_of_the_numbers_and_of_torch():
    assert numerics_mismatch(HUB, HUB) == ""
    assert numerics_mismatch(Numerics(version=4, torch="2.13.0"), HUB) == (
        "your copy of thinpipe differs from the hub's (yours has numerics version 4, the hub's 3): install the hub's "
        f"version of thinpipe, {thinpipe.__version__}"
    )
    assert numerics_mismatch(Numerics(version=3, torch="2.13.1"), HUB) == (
        "your torch differs from the hub's (yours is 2.13.1, the hub's 2.13.0): install torch 2.13.0"
    )


def test_ours():
    assert numerics().version == NUMERICS_VERSION
    assert "+" not in numerics().torch


@pytest.mark.parametrize(
    "bad", [{"version": "1"}, {"version": -1}, {"version": 1.5}, {"torch": "2" * 201}, {"code": "x"}]
)
def test_only_these_fields_of_these_types_are_read(bad):
    good = {"version": 1, "torch": "2.13.0"}
    assert msgspec.convert(good, Numerics) == Numerics(version=1, torch="2.13.0")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**good, **bad}, Numerics)
