"""The hub reads all of its newest checkpoint before an epoch begins, however long that takes: peers are answered."""

import asyncio
import threading

import pytest

from tests.train.hubs import ask_again, ask_next, begin_epoch, running_hub
from tests.train.programs import PATIENCE
from thinpipe.swarm import epochs
from thinpipe.swarm.messages import Give, Wait, Work


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(epochs, "ANSWER_SECONDS", 1.5)


def slow_disk(hosted):
    """(how often all was read, what lets the reading end)."""
    looks, read, go_on = [], hosted.look, threading.Event()

    async def look():
        looks.append(1)
        await read()
        await asyncio.to_thread(go_on.wait, PATIENCE)

    hosted.look = look
    return looks, go_on


def test_peers_are_told_to_wait_while_the_hub_reads(run_config):
    with running_hub(run_config) as running, running.post("p0") as first, running.post("p1") as second:
        begin_epoch(running, first, second)
        looks, go_on = slow_disk(running.hub.hosted)
        try:
            for _ in range(2):
                for post in (first, second):
                    answer = ask_next(post, running, took_part_in=1)
                    assert isinstance(answer, Wait)
                    assert answer.text == "the hub reads step 0 to see whether it is whole"
            assert running.hub.status().waits_for == answer.text
        finally:
            go_on.set()
        assert [work.epoch for work in begin_epoch(running, first, second)] == [2, 2]
        assert len(looks) == 1


def test_nothing_is_read_again_while_an_epoch_cannot_begin(run_config):
    with running_hub(run_config, ("p0",)) as running, running.post("p0") as post:
        begin_epoch(running, post)
        looks, go_on = slow_disk(running.hub.hosted)
        go_on.set()
        number = running.hub.broker.folder / "epoch"
        number.unlink()
        number.mkdir()
        for _ in range(2):
            answer = ask_next(post, running, took_part_in=1)
            assert isinstance(answer, Wait)
            assert answer.text.startswith("the hub cannot go on"), answer.text
        assert len(looks) == 1
        number.rmdir()
        assert isinstance(ask_again(post, running, took_part_in=1), Work)


def test_what_rots_after_it_was_read_is_found_when_the_epoch_cannot_begin(run_config):
    with running_hub(run_config, ("p0",)) as running, running.post("p0") as post:
        begin_epoch(running, post)
        looks, go_on = slow_disk(running.hub.hosted)
        assert isinstance(ask_next(post, running, took_part_in=1), Wait)
        (running.hub.hosted.newest.path / "run.safetensors").unlink()
        go_on.set()
        answer = ask_again(post, running, took_part_in=1)
        assert isinstance(answer, Give)
        assert list(answer.files) == ["run.safetensors"]
        assert len(looks) == 2
