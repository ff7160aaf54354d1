"""`thinpipe train` in several processes: the same run as in one, however it is placed, stopped or broken."""

import contextlib
import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.programs import PATIENCE, files_of, steps_of
from tests.transport.processes import free_port, group_environment
from tests.warm import WarmProcess
from thinpipe.checkpoint import find_checkpoint
from thinpipe.cli import main
from thinpipe.config.link import LinkConfig
from thinpipe.config.run import CheckpointConfig, ParallelismConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import Stopped, read_events
from thinpipe.training.graceful_shutdown import follow_parent, install_handler, restore_handlers
from thinpipe.training.trainer import Trainer

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def placed(config, degree, name, **changes):
    """The same run in another folder and on so many processes."""
    parallelism = replace(config.parallelism, pipeline_parallel_degree=degree, timeout_seconds=PATIENCE, **changes)
    folder = config.job.dump_folder.parent / name
    return replace(config, parallelism=parallelism, job=replace(config.job, dump_folder=folder))


def start(config, environment=ENVIRONMENT):
    folder = config.job.dump_folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wanted.toml").write_text(dump_toml(config))
    command = "thinpipe", "train", folder / "wanted.toml"
    return WarmProcess(*command, env=environment, stdout=subprocess.PIPE, process_group=0)


def start_hosts(configs):
    """One process each, as torchrun starts them on several machines."""
    port = free_port()
    return [
        start(config, {**ENVIRONMENT, **group_environment(rank, len(configs), port=port)})
        for rank, config in enumerate(configs)
    ]


def finish(process, seconds=PATIENCE):
    printed, _ = process.communicate(timeout=seconds)
    return process.returncode, printed


def children(process):
    """Of a launcher, in the order in which it started them."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    return []


def wait_for_step(config, step, process, seconds=PATIENCE):
    log, deadline = config.job.dump_folder / "events.jsonl", time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if log.exists() and any(event.step >= step for event in steps_of(config)):
            return
        time.sleep(0.1)
    pytest.fail(f"no step {step}: {process.communicate(timeout=20)[0][-3000:] if process.poll() is not None else ''}")


def wait_until(true, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def eight_segments(run_config):
    model = replace(run_config.model, n_layers=8, boundaries=tuple(range(1, 8)))
    return replace(
        run_config,
        model=model,
        checkpoint=CheckpointConfig(interval=3, keep_latest_k=0),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=1),
    )


@pytest.fixture
def endless(run_config):
    """Two segments, and more steps than anyone waits for."""
    training = replace(run_config.training, steps=100_000)
    return placed(replace(run_config, training=training), 2, "endless")


IN_TWO = (2, 3, {"pipeline_parallel_schedule": "ZBVZeroBubble"})
IN_EIGHT = (8, 9, {"pipeline_parallel_schedule": "GPipe"})
IN_ONE = (1, 6, {})


@pytest.mark.parametrize(
    "resumes", [(IN_TWO, IN_ONE), pytest.param((IN_EIGHT,), marks=pytest.mark.long)], ids=["2 and 1", "8"]
)
def test_a_checkpoint_does_not_know_how_many_processes_wrote_it(eight_segments, resumes):
    """Saved from four processes, resumed in two, one and eight: bit for bit the run of one process."""
    alone = placed(eight_segments, 1, "alone")
    Trainer(alone).train()
    four = placed(eight_segments, 4, "four", pipeline_parallel_extra_microbatches=2)
    code, printed = finish(start(four))
    assert code == 0, printed
    steps = (3, 6, 9, 12)
    assert [files_of(four, step) for step in steps] == [files_of(alone, step) for step in steps]
    assert [event.loss for event in steps_of(four)] == [event.loss for event in steps_of(alone)]
    assert "loss" in printed
    assert "loss" in (four.job.dump_folder / "processes" / "process-3.log").read_text()  # every console shows it
    assert main(["export", str(four.job.dump_folder), str(four.job.dump_folder / "exported")]) == 0
    for degree, first, changes in resumes:
        resumed = placed(eight_segments, degree, f"resumed-{degree}", **changes)
        source = four.job.dump_folder / "checkpoints" / f"step-{first:08d}"
        shutil.copytree(source, resumed.job.dump_folder / "checkpoints" / source.name)
        code, printed = finish(start(resumed))
        assert code == 0, printed
        assert f"resumed from {resumed.job.dump_folder}" in printed
        assert files_of(resumed, 12) == files_of(alone, 12)


def test_a_signal_to_any_one_process_saves_on_all(endless):
    launcher = start(endless)
    wait_for_step(endless, 2, launcher)
    os.kill(children(launcher)[1], signal.SIGTERM)
    code, printed = finish(launcher)
    assert code == 0, printed
    stopped = [e for e in read_events(endless.job.dump_folder / "events.jsonl") if isinstance(e, Stopped)]
    assert [event.reason for event in stopped] == ["signal"]
    checkpoint = find_checkpoint(endless.job.dump_folder)
    assert checkpoint.manifest.step == stopped[0].step == steps_of(endless)[-1].step
    again = Trainer(placed(endless, 1, "endless"))  # and one process can go on with it
    again.engine.restore(checkpoint)


STOPS = [signal.CTRL_BREAK_EVENT] if sys.platform == "win32" else [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize(
    ("number", "variables"), [(STOPS[0], {"USE_LIBUV": "0"}), (STOPS[-1], {})], ids=["no libuv", "torch's default"]
)
def test_a_launcher_that_is_asked_to_stop_saves(endless, number, variables):
    """Signals go through the pipe to process 0, once; the store is also torch's without libuv, as on Windows."""
    launcher = start(endless, {**ENVIRONMENT, **variables})
    wait_for_step(endless, 2, launcher)
    os.kill(launcher.pid, number)
    code, printed = finish(launcher)
    assert code == 0, printed
    stopped = [e for e in read_events(endless.job.dump_folder / "events.jsonl") if isinstance(e, Stopped)]
    assert [(event.reason, event.step) for event in stopped] == [("signal", steps_of(endless)[-1].step)]
    assert find_checkpoint(endless.job.dump_folder).manifest.step == stopped[0].step


def test_a_killed_process_ends_the_run_and_is_named(endless):
    """It saves after every step, so that the kill may come in the middle of one: what was finished stays."""
    endless = replace(endless, checkpoint=CheckpointConfig(interval=1, keep_latest_k=2))
    launcher = start(endless)
    wait_for_step(endless, 2, launcher)
    os.kill(children(launcher)[1], signal.SIGKILL)
    code, printed = finish(launcher, PATIENCE / 2)  # sooner than anything times out
    assert code == 1
    last = printed.strip().splitlines()[-1]
    assert last.startswith("thinpipe: process 1 was ended by SIGKILL"), printed
    assert not [event for event in read_events(endless.job.dump_folder / "events.jsonl") if isinstance(event, Stopped)]
    checkpoint = find_checkpoint(endless.job.dump_folder)
    assert steps_of(endless)[-1].step - checkpoint.manifest.step <= 1
    Trainer(placed(endless, 1, "endless")).engine.restore(checkpoint)


def test_a_process_that_hangs_ends_the_run_with_stage_and_step(endless):
    impatient = replace(endless, parallelism=replace(endless.parallelism, timeout_seconds=30))
    launcher = start(impatient)
    wait_for_step(impatient, 2, launcher)
    stopped = children(launcher)[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        code, printed = finish(launcher)
    finally:
        for process in children(launcher):
            os.kill(process, signal.SIGKILL)
    assert code == 1
    last = printed.strip().splitlines()[-1]
    assert last.startswith("thinpipe: process 0, stage 0, step "), printed
    # It was stopped in the middle of the pipeline, or of the exchange at the end of a step.
    assert re.search("step \\d+: .*(stage 1|process 1 of the run)", last), printed


def test_processes_end_when_their_launcher_is_killed(endless):
    launcher = start(endless)
    wait_for_step(endless, 2, launcher)
    orphans = children(launcher)
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") for pid in orphans):
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in orphans)
    assert find_checkpoint(endless.job.dump_folder).manifest.step == steps_of(endless)[-1].step


def test_machines_that_share_no_folder_keep_their_own_layers(run_config):
    """As under torchrun on two hosts: each has its layers and the whole manifest; together they are a checkpoint."""
    half = replace(run_config, checkpoint=replace(run_config.checkpoint, interval=6))
    configs = [placed(half, 2, f"host-{rank}") for rank in range(2)]
    alone = placed(run_config, 1, "alone")
    Trainer(alone).train()

    def run():
        for code, printed in map(finish, start_hosts(configs)):
            assert code == 0, printed
            assert "loss" in printed

    run()
    folders = [config.job.dump_folder / "checkpoints" for config in configs]
    for folder in folders:
        shutil.rmtree(folder / "step-00000012")
    run()  # from step 6, each with its own half
    first, second = ({path.name for path in (folder / "step-00000012").iterdir()} for folder in folders)
    assert first & second == {"manifest.json", "run.safetensors"}
    shutil.copytree(folders[1] / "step-00000012", folders[0] / "step-00000012", dirs_exist_ok=True)
    assert files_of(configs[0], 12) == files_of(alone, 12)
    shutil.rmtree(folders[1])
    (other, others_text), (own, own_text) = map(finish, start_hosts(configs))
    assert (other, own) == (1, 2)
    assert "process 1 has no whole checkpoint" in others_text
    assert "process 1 has no whole checkpoint" in own_text


@pytest.mark.parametrize("damaged", [0, 1])
def test_the_launcher_prints_the_error_of_the_process_that_has_the_problem(run_config, damaged):
    """Every process reports the same problem at the same moment, only one of them as its own."""
    config = placed(run_config, 2, "damaged")
    code, printed = finish(start(config))
    assert code == 0, printed
    for checkpoint in (config.job.dump_folder / "checkpoints").iterdir():
        (checkpoint / ("first.safetensors", "last.safetensors")[damaged]).write_bytes(b"")
    code, printed = finish(start(config))
    last = printed[printed.rindex("thinpipe: process") :]
    assert code == 2, printed
    assert last.startswith(f"thinpipe: process {damaged}, stage {damaged}, step 1: process {damaged} has no whole"), (
        last
    )
    reports = sorted((config.job.dump_folder / "processes").glob("error-*.json"))
    assert [msgspec.json.decode(path.read_bytes())["in_other_process"] for path in reports] == [
        rank != damaged for rank in range(2)
    ]


@pytest.fixture
def launcher_pipe():
    """Standard input of this process, as of one that a launcher has started: the writing end."""
    reader, writer = os.pipe()
    stdin = os.dup(0)
    os.dup2(reader, 0)
    os.close(reader)
    with open(writer, "wb", buffering=0) as pipe:
        yield pipe
    os.dup2(stdin, 0)
    os.close(stdin)


def test_signals_come_through_the_pipe_and_its_end_is_one_also_when_nobody_reads_warnings(launcher_pipe):
    """The warning waits for the signal here, as it would wait for a reader of a full pipe."""
    received, ended, seen = queue.Queue(), threading.Event(), queue.Queue()

    class FullPipe(logging.Handler):
        def emit(self, record):  # noqa: ARG002
            seen.put(ended.wait(PATIENCE / 10))

    def receive(number, _frame):
        received.put(number)
        if received.qsize() == 3:
            ended.set()

    logger, handler = logging.getLogger("thinpipe"), FullPipe()
    previous = install_handler(receive)
    logger.addHandler(handler)
    try:
        follow_parent()
        for number in (signal.SIGINT, signal.SIGTERM):
            n_before = received.qsize()
            launcher_pipe.write(bytes([number]))
            wait_until(lambda n=n_before: received.qsize() > n)
        launcher_pipe.close()
        assert ended.wait(PATIENCE)
        assert [received.get_nowait() for _ in range(3)] == [signal.SIGINT, signal.SIGTERM, signal.SIGTERM]
        assert seen.get(timeout=PATIENCE), "the signal came before the warning"
    finally:
        logger.removeHandler(handler)
        restore_handlers(previous)


def test_other_settings_in_one_process_are_named(run_config):
    configs = [placed(run_config, 2, f"host-{rank}") for rank in range(2)]
    configs[1] = replace(
        configs[1],
        optimizer=replace(configs[1].optimizer, lr=0.5),
        checkpoint=replace(configs[1].checkpoint, interval=7),  # all processes save together, at the same steps
    )
    _, (code, printed) = map(finish, start_hosts(configs))
    assert code == 2
    assert "process 1 has other settings than process 0" in printed
    assert re.search(r"optimizer.lr \S+ -> 0.5; checkpoint.interval \S+ -> 7\b", printed)


def test_torchrun_starts_the_same_module(run_config):
    config = placed(run_config, 2, "torchrun")
    folder = config.job.dump_folder
    folder.mkdir()
    (folder / "wanted.toml").write_text(dump_toml(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "thinpipe", "train", str(folder / "wanted.toml")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2
    alone = placed(run_config, 1, "alone")
    Trainer(alone).train()
    assert files_of(config, 12) == files_of(alone, 12)


def test_a_slow_line_changes_the_time_and_nothing_else(run_config, capsys):
    """And log and report say what the links did."""
    fast, slow = (placed(run_config, 2, name) for name in ("fast", "slow"))
    slow = replace(slow, link=LinkConfig(up="2mbps", down="2mbps", latency="20ms"))
    for config in (fast, slow):
        code, printed = finish(start(config))
        assert code == 0, printed
    assert files_of(fast, 12) == files_of(slow, 12)
    for event in steps_of(slow):
        forward, backward = event.links
        # 8 samples of 16 tokens, 4 numbers of 4 bytes each, and 17 ids of 2 bytes a sample.
        assert (forward.boundary, forward.forward, forward.nbytes) == (1, True, 8 * 16 * 16 + 8 * 17 * 2)
        assert (backward.boundary, backward.forward, backward.nbytes) == (1, False, 8 * 16 * 16)
        took = [link.waited_s / (1 - busy) for link, busy in zip((backward, forward), event.busy, strict=True)]
        for link in event.links:
            assert link.nbytes * 8e-6 / link.mbps == pytest.approx(max(took))
            assert link.mbps < 2
        assert max(took) > 0.04
        assert took[0] <= event.seconds
        assert 0 < event.bubble < 1
    assert main(["report", str(slow.job.dump_folder), "--against", str(fast.job.dump_folder)]) == 0
    *runs, cost, page = capsys.readouterr().out.strip().splitlines()[-4:]
    fast_line, slow_line = sorted(runs)  # printed by tokens per second, which other programs on this machine may turn
    assert fast_line.startswith("fast")
    assert slow_line.startswith("slow")
    assert "34 bytes/token" in slow_line  # 32 for states and gradients, 2 and a little for ids
    assert "slow against fast: validation loss after 1,536 tokens" in cost
    assert cost.endswith("+0.0000 (+0.00%)")
    assert Path(page).with_name("comparison.png").stat().st_size > 10_000


def test_too_few_segments_or_processes_are_refused_with_advice(run_config):
    small = replace(run_config, parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=1))
    code, printed = finish(start(placed(small, 4, "many")))
    assert code == 2
    assert "needs a model of at least 4 segments, and this model has 3" in printed.splitlines()[-1]
    with pytest.raises(UserError, match=r"needs 3 micro-batches or more, and there are 2: set .* to at most 2"):
        placed(run_config, 3, "three")
    code, printed = finish(start(placed(run_config, 2, "two"), {**ENVIRONMENT, "WORLD_SIZE": "3", "RANK": "0"}))
    assert code == 2
    assert "--parallelism.pipeline-parallel-degree 3" in printed
