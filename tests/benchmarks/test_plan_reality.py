"""Plans against two real runs: bytes exactly, memory closely, and speed on a machine that has nothing else to do."""

from functools import cache
from pathlib import Path

import pytest

from benchmarks.plan_reality import (
    CALIBRATIONS,
    SETTINGS,
    WITHOUT_LINES,
    Calibration,
    Measured,
    calibrate,
    config_of,
    measure,
    overhead_nbytes,
    predict,
)
from thinpipe.cli import main

pytestmark = pytest.mark.programs

STEPS = 3
CORES = 2.0
THIN, DENSE = SETTINGS[5], SETTINGS[3]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Settings, and what was measured of a real run of them."""
    folder = tmp_path_factory.mktemp("tokens") / "tokens"
    sources = ["--sources", "sample:train", "--validation-sources", "sample:validation"]
    assert main(["tokenize", *sources, "--vocab-size", "2048", "--output", str(folder)]) == 0

    @cache
    def real(setting):
        config = config_of(setting, folder, Path("run"), steps=STEPS)
        return config, measure(config)

    return real


@pytest.mark.parametrize(
    "setting", [pytest.param(THIN, marks=pytest.mark.long), DENSE], ids=lambda setting: setting.name
)
def test_bytes_and_memory_are_those_of_the_plan(setting, run):
    config, measured = run(setting)
    overhead = overhead_nbytes(*run(CALIBRATIONS[0]))
    plan = predict(config, Calibration(flops=1e10, overhead_nbytes=overhead), cores=CORES)
    both = [config.microbatches * plan.messages.forward_nbytes, config.microbatches * plan.messages.backward_nbytes]
    assert measured.link_nbytes == both * (setting.stages - 1)
    for machine_load, there in zip(plan.machine_loads, measured.memory_nbytes, strict=True):
        assert machine_load.memory.total == pytest.approx(there, rel=1 / 6)


def test_a_machine_of_known_speed_is_found_from_its_two_runs(tmp_path):
    known = Calibration(flops=5e10, pass_s=4e-3, overhead_nbytes=300_000_000)

    def ran(setting):
        config = config_of(setting, tmp_path, Path("run"), steps=STEPS)
        plan = predict(config, known, cores=CORES)
        memory = [machine_load.memory.total for machine_load in plan.machine_loads]
        return config, Measured(seconds=plan.timeline.seconds, memory_nbytes=memory, link_nbytes=[], stolen=0.0)

    for settings in (CALIBRATIONS, WITHOUT_LINES):
        found = calibrate(*map(ran, settings), cores=CORES)
        assert found.flops == pytest.approx(known.flops, rel=0.01)
        assert found.pass_s == pytest.approx(known.pass_s, rel=0.05)
        assert found.overhead_nbytes == known.overhead_nbytes


@pytest.mark.quiet
@pytest.mark.parametrize("setting", [THIN, DENSE], ids=lambda setting: setting.name)
def test_tokens_per_second_are_within_three_tenths(setting, run):
    config, measured = run(setting)
    calibration = calibrate(run(CALIBRATIONS[0]), run(CALIBRATIONS[1]), cores=CORES)
    assert predict(config, calibration, cores=CORES).timeline.seconds == pytest.approx(measured.seconds, rel=0.3)
