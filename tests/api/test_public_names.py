"""`import thinpipe` is light, has every public name, and those of its packages do not hide a public name."""

import importlib
import subprocess
import sys

import pytest

import thinpipe


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=True)


def test_the_import_brings_no_torch_and_no_other_library():
    program = "import sys; before = set(sys.modules); import thinpipe; print(*sorted(set(sys.modules) - before))"
    brought = {name.split(".")[0] for name in run(program).stdout.split()}
    assert brought & {"torch", "numpy", "msgspec", "rich", "tyro"} == set()


@pytest.mark.quiet
def test_the_import_takes_less_than_a_tenth_of_a_second():
    program = "import time; began = time.perf_counter(); import thinpipe; print(time.perf_counter() - began)"
    assert min(float(run(program).stdout) for _ in range(5)) < 0.1


@pytest.mark.parametrize("name", thinpipe.__all__)
def test_a_public_name_is_there_says_what_it_is_and_stays(name):
    importlib.import_module("thinpipe.training.trainer")  # no package of a public name's name replaces it
    importlib.import_module("thinpipe.planning.planner")
    found = getattr(thinpipe, name)
    assert callable(found)
    assert found.__doc__
    assert name in dir(thinpipe)


def test_training_settings_and_plans_need_no_torch():
    program = (
        "import sys, thinpipe; thinpipe.RunConfig(); thinpipe.plan; thinpipe.train; thinpipe.Run; thinpipe.tokenize; "
        "sys.exit('torch' in sys.modules)"
    )
    run(program)


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        thinpipe.trian  # noqa: B018


def test_every_name_has_a_module_and_the_other_way_round():
    assert sorted(thinpipe._MODULES) == sorted(thinpipe.__all__)
