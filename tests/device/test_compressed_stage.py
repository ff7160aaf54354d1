"""Modules of somebody else in two processes on `sim` give the bits of one process, without float64 on the device."""

import json

import pytest

from tests.device.compressed_worker import CASES
from tests.device.sim import environment
from tests.pipeline.compressed_worker import BOUNDARIES, SCHEDULES
from tests.pipeline.test_compressed_stage import compare_with_twin
from tests.transport.processes import start


@pytest.fixture(scope="module")
def reports(sim_library, tmp_path_factory):  # noqa: ARG001
    output = tmp_path_factory.mktemp("compressed") / "result"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(SIM_NO_F64=1).items():
            patch.setenv(name, value)
        workers = start(2, "tests.device.compressed_worker", output)
    printed = [worker.communicate(timeout=800)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(text[-3000:] for text in printed)
    return [json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("schedule", "boundary"), CASES)
def test_two_processes_on_the_device_equal_the_twin(reports, schedule, boundary):
    count = sum(map(len, SCHEDULES[schedule][1]))
    compare_with_twin(reports, f"{schedule} {boundary}", BOUNDARIES[boundary], count)
