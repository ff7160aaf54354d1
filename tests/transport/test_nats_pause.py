"""A receiver that stops for a while: nobody's memory grows past its bound, and then everything goes on."""

import json
import os
import signal
import time
from dataclasses import asdict

import psutil

from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import hub_services
from tests.transport.nats_stream import MESSAGES, NBYTES
from tests.transport.processes import start
from thinpipe.transport.nats.streams import WINDOW_NBYTES

PAUSE_SECONDS = float(os.environ.get("PAUSE_SECONDS", "3"))
SLACK_NBYTES = 3 * WINDOW_NBYTES
"""Copies on the way, in a sender's and the server's buffers, and what an allocator keeps."""


def grown(process, before):
    return psutil.Process(process).memory_info().rss - before


def test_a_paused_receiver_bounds_memory_and_loses_nothing(tmp_path, monkeypatch):
    with running_broker(tmp_path, ("p0", "p1")) as running, hub_services(running):
        told = {
            "url": running.url,
            "fingerprint": running.fingerprint,
            "credentials": {name: asdict(each) for name, each in running.credentials.items()},
        }
        monkeypatch.setenv("BROKER", json.dumps(told))
        sender, receiver = workers = start(2, "tests.transport.nats_stream")
        try:
            assert receiver.stdout.readline() == "begun\n"
            os.kill(receiver.pid, signal.SIGSTOP)
            assert sender.stdout.readline() == "begun\n"
            watched = {sender.pid: 0, running.broker.server_pid: 0}
            before = {pid: psutil.Process(pid).memory_info().rss for pid in watched}
            until = time.monotonic() + PAUSE_SECONDS
            while time.monotonic() < until:
                watched = {pid: max(most, grown(pid, before[pid])) for pid, most in watched.items()}
                time.sleep(0.05)
            assert sender.poll() is None
            os.kill(receiver.pid, signal.SIGCONT)
            assert receiver.communicate(timeout=600)[0] == "all came\n"
            assert sender.communicate(timeout=600)[0] == "all left\n"
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    assert MESSAGES * NBYTES > 2 * (WINDOW_NBYTES + SLACK_NBYTES)  # so that the bound means something
    assert max(watched.values()) < WINDOW_NBYTES + SLACK_NBYTES, watched
    print(f"grown by at most {[round(most / 2**20, 1) for most in watched.values()]} MiB (sender, server)")
