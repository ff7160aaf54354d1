"""`python -m benchmarks.links`: the bounds, the file of points, and one tiny run through the real command."""

import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from msgspec import structs

from benchmarks.links.bounds import break_even_mbps, busiest_nbytes, link_bound_seconds, message_nbytes
from benchmarks.links.config import EnginePart, LinksConfig, RatioPart, SchedulesPart, SweepPart
from benchmarks.links.points import Point, PointsFile, RunTimes, Task
from benchmarks.links.results import sweep_rows
from benchmarks.links.tasks import all_tasks
from benchmarks.links.workload import Run, RunLink, Shape
from thinpipe.core.errors import UserError
from thinpipe.transport.emulation.framing import wire_nbytes

TINY = Shape(
    stages=3,
    blocks_per_stage=1,
    dim=32,
    heads=2,
    kv_heads=1,
    hidden_dim=32,
    vocab=64,
    seq_len=16,
    sequences=2,
    microbatches=8,
)
DENSE = Run(shape=TINY, number_format="bf16", link=RunLink(mbps=1, round_trip_ms=40))


def test_messages_are_the_numbers_the_ids_and_all_framing():
    ids_nbytes = 2 * 2 * (16 + 1)
    assert message_nbytes(DENSE) == (wire_nbytes(2 * 16 * 32 * 2 + ids_nbytes), wire_nbytes(2 * 16 * 32 * 2))
    thin = structs.replace(DENSE, width=3, number_format="int8")
    assert message_nbytes(thin) == (wire_nbytes(2 * 16 * (3 + 2) + ids_nbytes), wire_nbytes(2 * 16 * (3 + 2)))


def test_a_link_in_the_middle_carries_both_directions():
    forward, backward = message_nbytes(DENSE)
    assert busiest_nbytes(DENSE) == forward + backward
    assert busiest_nbytes(structs.replace(DENSE, shape=replace(TINY, stages=2))) == forward


def follow(run: Run) -> float:
    """Seconds of a step that computes in no time, message by message, with no limit to what is in flight."""
    forward, backward = (nbytes * 8e-6 / run.link.mbps for nbytes in message_nbytes(run))
    latency, stages, count = run.link.round_trip_ms / 2e3, run.shape.stages, run.shape.microbatches
    ready = [(0.0, 0, index, True) for index in range(count)]  # (moment, stage, micro-batch, going forward)
    free, turned, end = [0.0] * stages, [], 0.0
    while ready:
        moment, stage, index, ahead = ready.pop(ready.index(min(ready)))
        if ahead and stage == stages - 1:
            turned.append((moment, stage, index, False))
            if run.schedule == "1F1B":
                ready.append(turned.pop())
            elif len(turned) == count:
                ready += [(moment, stage, each, False) for _, _, each, _ in turned]
        elif not ahead and stage == 0:
            end = max(end, moment)
        else:
            free[stage] = max(moment, free[stage]) + (forward if ahead else backward)
            ready.append((free[stage] + latency, stage + (1 if ahead else -1), index, ahead))
    return end


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("mbps", "round_trip_ms"), [(1, 0), (1, 40), (100, 40)])
def test_the_link_bound_is_below_every_real_step_and_close(schedule, stages, mbps, round_trip_ms):
    shape = replace(TINY, stages=stages, microbatches=64)
    run = Run(
        shape=shape, number_format="bf16", schedule=schedule, link=RunLink(mbps=mbps, round_trip_ms=round_trip_ms)
    )
    assert link_bound_seconds(run) <= follow(run) * (1 + 1e-9)
    assert link_bound_seconds(run) >= 0.8 * follow(run)


def test_full_speed_has_no_link_bound_and_the_break_even_rate_is_where_both_take_as_long():
    assert link_bound_seconds(structs.replace(DENSE, link=RunLink())) == 0
    mbps = break_even_mbps(DENSE, compute_seconds=2.0)
    assert busiest_nbytes(DENSE) * TINY.microbatches * 8 / (mbps * 1e6) == pytest.approx(2.0)


def test_points_are_found_again_also_after_a_crash(tmp_path):
    task = Task(part="sweep", name="one", runs=(structs.replace(DENSE, link=RunLink()), DENSE), steps=(1, 1))
    point = Point(key=task.key, task=task, times=[RunTimes(seconds=[1.0]), RunTimes(seconds=[2.0])])
    path = tmp_path / "points.jsonl"
    path.write_bytes(b'{"key": "cut sho')
    PointsFile(path).add(point)
    assert PointsFile(path).points == {task.key: point}
    assert replace(task, steps=(1, 2)).key != task.key


def test_compute_only_comes_from_the_neighbourhood_of_a_point():
    free = structs.replace(DENSE, link=RunLink())
    points = []
    for mbps, full_speed in ((10, 1.0), (20, 1.0), (50, 3.0), (80, 3.0)):
        task = Task(part="sweep", name="", runs=(free, structs.replace(DENSE, link=RunLink(mbps=mbps))), steps=(2, 1))
        times = [RunTimes(seconds=[full_speed] * 2), RunTimes(seconds=[2 * full_speed])]
        points.append(Point(key=task.key, task=task, times=times))
    (method,), rows = sweep_rows(points)
    assert method.compute_only == TINY.step_tokens / 2
    assert [TINY.step_tokens / row.compute_only for row in rows] == [1, 1, 3, 3]
    assert [row.ratio for row in rows] == [0.5] * 4
    assert not rows[0].reached


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": ()},
        {"engine": EnginePart(pairs=7)},
        {"sweep": SweepPart(mbps=())},
        {"sweep": SweepPart(shape=TINY)},
        {"ratio": RatioPart(heavy_pairs=4)},
        {"schedules": SchedulesPart(steps=0)},
    ],
)
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises(UserError):
        LinksConfig(**wrong)


def test_the_default_sweep_is_the_whole_grid():
    tasks = [task for task in all_tasks(LinksConfig()) if task.part == "sweep"]
    assert len(tasks) == 6 * 7 * 2
    assert all(task.runs[1].shape.microbatches >= 64 for task in tasks)


FLAGS = """
    --engine.pairs 6 --engine.schedules 1F1B
    --sweep.mbps 0.3 100 --sweep.round-trips-ms 20 --sweep.compressions 8 --sweep.steps 2 --sweep.extra 2
    --ratio.mbps 0.3 --ratio.compression 8 --ratio.pairs 6 --ratio.heavy-pairs 6
    --ratio.shape.no-compiled --ratio.shape.no-bf16
    --schedules.mbps 10 --schedules.round-trip-ms 20 --schedules.compressions --schedules.schedules 1F1B
    --schedules.steps 1 --schedules.extra 2
"""
SIZES = {field.name: getattr(TINY, field.name) for field in fields(TINY) if field.type is int} | {"stages": 2}


def command(output):
    shapes = ("engine.shape", "sweep.shape", "ratio.shape", "ratio.heavy", "schedules.shape")
    pairs = [(f"--{shape}.{name.replace('_', '-')}", str(size)) for shape in shapes for name, size in SIZES.items()]
    sizes = [word for pair in pairs for word in pair]
    return [sys.executable, "-m", "benchmarks.links", "--output", str(output), *FLAGS.split(), *sizes]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder of the real command's results, and what it printed."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("links")
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.long
def test_the_command_end_to_end_and_again(measured, tmp_path):
    folder, printed = measured
    for name in ("sweep.png", "schedules.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert (folder / "links.md").read_text() in printed
    first = json.loads((folder / "links.json").read_text())
    check_json(first)

    lines = (folder / "points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "points.jsonl").write_bytes(b"".join(lines[:-1]))  # as if it had been stopped before the last point
    again = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=800)
    assert again.returncode == 0, again.stderr
    assert "[1/1] schedules: memory of" in again.stderr
    second = json.loads((tmp_path / "links.json").read_text())
    assert second["points"][:-1] == first["points"][:-1]
    assert second["points"][-1]["memory"] != first["points"][-1]["memory"]


def check_json(result):
    assert result["bench"] == "links"
    assert result["versions"]["torch"] == torch.__version__
    assert result["config"]["sweep"]["mbps"] == [0.3, 100]
    (engine,) = result["engine"]
    assert len(engine["ratio"]["first_seconds"]) == 6
    ours, bare = next(point["times"] for point in result["points"] if point["task"]["part"] == "engine")
    assert ours["loss"] == pytest.approx(bare["loss"], abs=0.02)  # the same model on the same tokens

    assert all(row["ratio"] > 0 and row["reached"] == (row["ratio"] >= 0.9) for row in result["sweep"])
    _, bf16, int8 = result["methods"]
    assert bf16["busiest_nbytes_per_token"] > int8["busiest_nbytes_per_token"]

    light, _ = result["ratio"]
    assert light["reached"] is (light["ratio"]["median"] >= 16.4)
    profiled = next(point for point in result["points"] if point["task"]["part"] == "ratio")
    assert len(profiled["operators"]) == 2
    assert any(operator["name"] == "aten::mm" for operator in profiled["operators"][0]["operators"])

    assert [(row["run"]["schedule"], row["run"]["extra"]) for row in result["schedules"]] == [("1F1B", 0), ("1F1B", 2)]
    for row in result["schedules"]:
        assert len(row["memory"]) == 2
        assert all(each["peak_nbytes"] >= each["kept_nbytes"] for each in row["memory"])


@pytest.mark.quiet
def test_the_link_decides_where_it_is_slow(measured):
    folder, _ = measured
    result = json.loads((folder / "links.json").read_text())
    (engine,) = result["engine"]
    assert 0.2 < engine["ratio"]["low"] <= engine["ratio"]["median"] <= engine["ratio"]["high"] < 5
    slow_dense, fast_dense, slow_thin, *_ = result["sweep"]
    assert 0.7 < slow_dense["ratio"] <= 1.02  # whatever else the machine does
    assert slow_dense["measured"] < 1.02 * slow_dense["link_only"] < slow_dense["compute_only"]
    assert fast_dense["measured"] > 2 * slow_dense["measured"]
    assert slow_thin["measured"] > 2 * slow_dense["measured"]
    dense, bf16, _ = result["methods"]
    assert dense["break_even_mbps"] > 3 * bf16["break_even_mbps"]
    light, _ = result["ratio"]
    assert light["ratio"]["median"] > 2
