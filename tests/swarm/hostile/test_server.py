"""nats-server is killed or stands still: its hub starts it again or dials again, and the same peers train on."""

import signal

import psutil
import pytest

from tests.programs import steps_of, wait_for_event
from thinpipe.core.events import Step


def server_of(hub):
    (server,) = (
        process
        for process in psutil.Process(hub.process.pid).children(recursive=True)
        if "nats-server" in process.name()
    )
    return server


@pytest.mark.parametrize("fault", ["killed", pytest.param("frozen", marks=pytest.mark.long)])
def test_peers_train_on_after_their_server_was(fault, start_hub, join, run_config):
    hub, invites = start_hub(2)
    peers = [join(invite, name) for invite, name in zip(invites, ("anna", "bert"), strict=True)]
    wait_for_event(run_config, Step, step=3)
    server = server_of(hub)
    if fault == "killed":
        server.kill()
        hub.until("the hub starts it again")
    else:
        server.suspend()
        hub.until("lost the connection to its own server")
        server.resume()
    hub.until("the hub is connected again")
    wait_for_event(run_config, Step, step=max(step.step for step in steps_of(run_config)) + 3)
    assert [program.process.poll() for program in (hub, *peers)] == [None] * 3
    assert (server_of(hub).pid == server.pid) == (fault == "frozen")
    hub.process.send_signal(signal.SIGINT)
    assert hub.finish() == 0, hub.printed
