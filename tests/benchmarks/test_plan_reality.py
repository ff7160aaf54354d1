"""Plans against two real runs: bytes exactly, memory closely, and speed on a machine that has nothing else to do."""

from pathlib import Path

import pytest

from benchmarks.plan_reality import CALIBRATION, SETTINGS, calibrate, config_of, measure, predict
from thinpipe.cli import main

STEPS = 3
CORES = 2.0
THIN, DENSE = SETTINGS[5], SETTINGS[3]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "tokens"
    sources = ["--sources", "sample:train", "--validation-sources", "sample:validation"]
    assert main(["tokenize", *sources, "--vocab-size", "2048", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def runs(tokens):
    found = {}
    for setting in (CALIBRATION, THIN, DENSE):
        config = config_of(setting, tokens, Path("run"), steps=STEPS)
        found[setting] = config, measure(config)
    return found


@pytest.fixture(scope="module")
def calibration(runs):
    return calibrate(*runs[CALIBRATION], cores=CORES)


@pytest.mark.parametrize("setting", [THIN, DENSE], ids=lambda setting: setting.name)
def test_bytes_of_every_link_are_those_of_the_plan(setting, runs, calibration):
    config, measured = runs[setting]
    plan = predict(config, calibration, cores=CORES)
    both = [config.microbatches * plan.messages.forward_nbytes, config.microbatches * plan.messages.backward_nbytes]
    assert measured.link_nbytes == both * (setting.stages - 1)


@pytest.mark.parametrize("setting", [THIN, DENSE], ids=lambda setting: setting.name)
def test_peak_memory_of_every_process_is_within_a_sixth(setting, runs, calibration):
    config, measured = runs[setting]
    plan = predict(config, calibration, cores=CORES)
    for part, there in zip(plan.parts, measured.memory_nbytes, strict=True):
        assert part.memory.total == pytest.approx(there, rel=1 / 6)


@pytest.mark.quiet
@pytest.mark.parametrize("setting", [THIN, DENSE], ids=lambda setting: setting.name)
def test_tokens_per_second_are_within_three_tenths(setting, runs, calibration):
    config, measured = runs[setting]
    assert predict(config, calibration, cores=CORES).timeline.seconds == pytest.approx(measured.seconds, rel=0.3)
