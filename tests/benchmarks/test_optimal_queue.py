"""The queue of the study takes what is unfinished, resumes what was killed, and ends when its hours are over."""

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from benchmarks.convergence import execute as executing
from benchmarks.convergence.execute import result_path, steps_done
from benchmarks.convergence.study import Study
from benchmarks.finetune.books import split_documents
from benchmarks.optimal.books import refuse_other_data, split_books
from benchmarks.optimal.progress import write_progress
from benchmarks.optimal.queue import next_unfinished, work_off
from benchmarks.optimal.runs import all_runs, tuning_run
from tests.benchmarks.test_convergence import keep
from tests.programs import PATIENCE
from thinpipe.config.run import CheckpointConfig, ModelSettings, RunConfig
from thinpipe.core.errors import UserError
from thinpipe.data import ShardWriter, Tokenizer, Tokens

SHAPE = ModelSettings(preset="llama-tiny", dim=32, n_layers=4, n_heads=2, n_kv_heads=1, hidden_dim=64)


@dataclass(frozen=True, kw_only=True)
class TinyRun(Study):
    """A run that takes seconds, with a checkpoint at every fourth step."""

    def config(self, data, folder) -> RunConfig:
        return replace(super().config(data, folder), checkpoint=CheckpointConfig(interval=4, keep_latest_k=1))


def tiny(name, steps):
    return TinyRun(
        question="tiny", name=name, priority=0, tokens=steps * 16 * 32, kind="dense", lr=1e-3, cuts=(2,), shape=SHAPE,
        seq_len=32, autocast=False,
    )  # fmt: skip


def wait_for(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_alive(process):
    return process.poll() is None


@pytest.fixture
def started(monkeypatch):
    """Every run that is started, in order."""
    runs, start = [], executing.start

    def remember(*arguments):
        runs.append(start(*arguments))
        return runs[-1]

    monkeypatch.setattr(executing, "start", remember)
    return runs


def test_the_next_run_is_the_first_without_a_record(tmp_path):
    runs = all_runs(tmp_path)
    assert next_unfinished(runs, tmp_path) == runs[0]
    keep(tmp_path, runs[0], [5.0])
    keep(tmp_path, runs[2], [5.0])
    assert next_unfinished(runs, tmp_path) == runs[1]
    keep(tmp_path, runs[1], [5.0])
    assert next_unfinished(runs, tmp_path) == runs[3]
    assert next_unfinished(runs[:3], tmp_path) is None


def test_the_page_of_progress_counts_hours_and_names_what_comes_next(tmp_path):
    runs = all_runs(tmp_path)
    keep(tmp_path, runs[0], [5.0])
    path = result_path(runs[0], tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 7200.0}))
    write_progress(runs, tmp_path)
    page = (tmp_path / "progress.md").read_text()
    left = sum(run.core_hours for run in runs[1:])
    assert f"1 of {len(runs)} runs are done. Core-hours: 2.0 spent on them, about {left:.1f} left." in page
    assert f"Next: {runs[1].key}." in page
    assert page.count("| done |") == 1
    assert page.count("| open |") == len(runs) - 1


@pytest.mark.programs
def test_runs_are_carried_out_in_order_and_not_repeated(tokens, tmp_path, started):
    runs, pages = [tiny("first", 2), tiny("second", 2)], []
    output, work = tmp_path / "output", tmp_path / "work"

    def done():
        pages.append([run.name for run in runs if result_path(run, output).is_file()])

    assert work_off(lambda: runs, tokens, work, output, hours=1, on_progress=done)
    assert pages == [[], ["first"], ["first", "second"]]
    assert work_off(lambda: runs, tokens, work, output, hours=1)
    assert len(started) == 2


@pytest.mark.programs
def test_a_run_that_was_killed_goes_on_from_its_checkpoint(tokens, tmp_path, started):
    run, undisturbed = tiny("killed", 80), tmp_path / "undisturbed"
    output, work = tmp_path / "output", tmp_path / "work"

    def kill():
        wait_for(lambda: started and list((work / run.key / "checkpoints").glob("step-*")))
        started[0].process.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert not work_off(lambda: [run], tokens, work, output, hours=1), "the queue says that the run failed"
    killer.join()
    assert not result_path(run, output).exists()
    assert work_off(lambda: [run], tokens, work, output, hours=1)
    assert started[1].first_step >= 4
    assert work_off(lambda: [run], tokens, tmp_path / "other", undisturbed, hours=1)
    resumed, whole = (json.loads(result_path(run, folder).read_text()) for folder in (output, undisturbed))
    assert (resumed["starts"], whole["starts"]) == (2, 1)
    assert resumed["validations"] == whole["validations"]


@pytest.mark.programs
def test_a_queue_whose_earlier_queue_was_killed_waits_for_the_run_left_behind(tokens, tmp_path, started):
    run, output, work = tiny("left behind", 1_000_000), tmp_path / "output", tmp_path / "work"
    orphan = executing.start(run, tokens, work)
    wait_for(lambda: steps_done(work / run.key) >= 2)
    assert work_off(lambda: [run], tokens, work, output, hours=1 / 3600)
    assert started == [orphan], "no second process writes into the folder"
    assert is_alive(orphan.process)
    orphan.process.terminate()
    orphan.process.wait(timeout=PATIENCE)


@pytest.mark.programs
def test_the_run_is_saved_and_stopped_when_the_hours_are_over(tokens, tmp_path, started):
    run, second = tiny("endless", 1_000_000), tiny("never begun", 2)
    output, work = tmp_path / "output", tmp_path / "work"

    def clock():
        """Two hours pass as soon as the run has made three steps."""
        return 7200.0 if steps_done(work / run.key) >= 3 else 0.0

    assert work_off(lambda: [run, second], tokens, work, output, hours=1.5, clock=clock)
    assert [each.study.name for each in started] == ["endless"]
    assert not is_alive(started[0].process)
    (checkpoint,) = (work / run.key / "checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) == steps_done(work / run.key), "no step is lost"
    assert not result_path(run, output).exists()


def test_no_run_begins_after_the_hours(tmp_path, started):
    assert work_off(lambda: [tiny("late", 2)], tmp_path, tmp_path / "work", tmp_path, hours=0.0)
    assert started == []


@pytest.mark.long
@pytest.mark.programs
def test_the_command_is_nice_and_stops_on_sigterm(six_books, tmp_path, programs):
    output, work = tmp_path / "output", tmp_path / "work"
    options = ("--hours", "1", "--data", six_books, "--output", output, "--work", work)
    not_compiled = {"TORCHDYNAMO_DISABLE": "1"}  # a minute less
    command = programs("queue", "next", *options, module="benchmarks.optimal", environment=not_compiled)
    first = work / tuning_run("D", 3e-3).key
    wait_for(lambda: steps_done(first) >= 1)
    assert os.getpriority(os.PRIO_PROCESS, command.process.pid) >= 10
    command.process.terminate()
    command.process.wait(timeout=PATIENCE)
    assert list((first / "checkpoints").glob("step-*"))
    assert "0 of 58 runs are done" in (output / "progress.md").read_text()
    assert not (output / "records").exists()


@pytest.fixture
def six_books(tmp_path):
    """Training text, and six validation books of different words, as `thinpipe tokenize` leaves them."""
    books = [f"{word} {word} and {word} again, " * 300 for word in ("one", "two", "three", "four", "five", "six")]
    tokenizer = Tokenizer.train(books, vocab_size=280)
    tokenizer.save(tmp_path / "six" / "tokenizer")
    for side in ("train", "validation"):
        with ShardWriter(tmp_path / "six" / side, tokenizer.vocabulary, source="words") as writer:
            for ids, text in zip(tokenizer.encode_batch(books), books, strict=True):
                writer.add(np.asarray(ids, np.uint32), text_nbytes=len(text))
            writer.finish()
    return tmp_path / "six"


def test_every_other_book_is_for_tuning_and_none_for_both(six_books, tmp_path):
    split_books(six_books, tmp_path / "books")
    split_books(six_books, tmp_path / "books")  # the second time there is nothing to do
    books = [book.tolist() for book in split_documents(Tokens(six_books / "validation"))]
    halves = {
        name: [book.tolist() for book in split_documents(Tokens(tmp_path / "books" / name / "validation"))]
        for name in ("tuning", "reported")
    }
    assert halves == {"tuning": books[::2], "reported": books[1::2]}
    for name in halves:
        half = tmp_path / "books" / name
        assert Tokens(half / "train").manifest == Tokens(six_books / "train").manifest
        assert Tokens(half / "validation").manifest.text_nbytes > 0
    whole = Tokens(six_books / "validation").manifest.text_nbytes
    assert whole == sum(Tokens(tmp_path / "books" / name / "validation").manifest.text_nbytes for name in halves)


def test_records_of_other_tokens_are_not_mixed(six_books, tmp_path, tokens):
    refuse_other_data(six_books, tmp_path / "output")
    refuse_other_data(six_books, tmp_path / "output")
    with pytest.raises(UserError, match="other tokens"):
        refuse_other_data(tokens, tmp_path / "output")
