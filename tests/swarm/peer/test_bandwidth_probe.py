"""Lines that are measured: the loopback, and lines of a known rate between network namespaces."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from benchmarks.netns import lab
from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import address, hub_services
from thinpipe.core.errors import UserError
from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.swarm.peer.bandwidth_probe import LinkMeter, measure_latency, measure_rates
from thinpipe.swarm.protocol.machine_report import MachineReport, ProcessorReport
from thinpipe.swarm.protocol.probe import MAX_PROBE_NBYTES, Probe, probe_service
from thinpipe.transport.nats.connection import HubConnection

_NO_LAB = lab.missing()
LIMIT = 300
PAYLOAD_SHARE = 1448 / 1514
"""Of a full frame."""


@pytest.fixture
def connection(tmp_path):
    with running_broker(tmp_path) as running, hub_services(running):
        connection = HubConnection(address(running, "p0"))
        yield connection
        connection.close()


def test_a_line_is_measured(connection):
    assert measure_latency(connection) > 0
    rates = measure_rates(connection, seconds_each=0.5, timeout_seconds=LIMIT)
    assert rates.up_bps > 0
    assert rates.down_bps > 0


@pytest.mark.quiet
def test_the_loopback_is_measured_in_time(connection):
    began = time.monotonic()
    assert 0 < measure_latency(connection) < 0.5
    rates = measure_rates(connection, seconds_each=0.5)
    assert time.monotonic() - began < 12
    print(f"\n{rates.up_bps / 1e6:.0f} Mbps up, {rates.down_bps / 1e6:.0f} Mbps down")
    assert rates.up_bps > 100e6
    assert rates.down_bps > 100e6


def test_the_hub_answers_with_as_much_as_was_asked_for_but_no_more():
    def answer(data):
        return asyncio.run(probe_service("p0", data))

    def asked(nbytes):
        return answer(msgspec.msgpack.encode(Probe(answer_nbytes=nbytes)))

    assert asked(0) == b""
    assert len(asked(MAX_PROBE_NBYTES)) == MAX_PROBE_NBYTES
    assert asked(1000) != asked(1000)
    for ask in (lambda: asked(MAX_PROBE_NBYTES + 1), lambda: asked(-1), lambda: answer(b"\xc1")):
        with pytest.raises(ProtocolError):
            ask()


async def silent(_peer, _data):
    return None


def test_a_link_that_carries_nothing_is_told_in_words(tmp_path):
    with running_broker(tmp_path) as running, hub_services(running, probe=silent):
        connection = HubConnection(address(running, "p0"))
        with pytest.raises(TimeoutError, match="too slow to train over"):
            measure_rates(connection, timeout_seconds=0.5)
        connection.close()


def test_an_interrupted_link_is_measured_again_and_a_dead_one_given_up(tmp_path):
    carries = False

    async def now_and_then(peer, data):
        return await probe_service(peer, data) if carries else None

    with running_broker(tmp_path) as running, hub_services(running, probe=now_and_then):
        connection, meter = HubConnection(address(running, "p0")), LinkMeter()
        seen = []
        for carries in (False, True, False, False, False):
            try:
                seen.append(len(meter.measure(connection, timeout_seconds=LIMIT if carries else 0.5)))
            except (TimeoutError, UserError) as error:
                seen.append(type(error).__name__)
        connection.close()
    assert seen == ["TimeoutError", 2, "TimeoutError", "TimeoutError", "UserError"]


def test_a_connection_to_a_frozen_server_leaves_no_tasks(tmp_path, caplog):
    with running_broker(tmp_path) as running, hub_services(running):
        connection = HubConnection(address(running, "p0"))
        os.kill(running.broker.server_pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError, match="too slow to train over"):
                measure_rates(connection, timeout_seconds=0.5)
            connection.close(linger_seconds=0.2)
        finally:
            os.kill(running.broker.server_pid, signal.SIGCONT)
        gc.collect()
        assert not connection._loop.is_running()
        assert connection._loop.is_closed()
    assert "destroyed" not in caplog.text


@pytest.mark.quiet
@pytest.mark.skipif(_NO_LAB is not None, reason=str(_NO_LAB))
@pytest.mark.parametrize(("rate", "latency"), [("20mbps", "20ms"), ("1mbps", "0ms")])
def test_a_line_of_a_known_rate(tmp_path, rate, latency):
    with lab.KernelTestbed(2, up=rate, down=rate, latency=latency) as machines:
        worker = [sys.executable, "-m", "tests.swarm.probe_worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        hub = machines.popen(0, [*worker, "hub", str(tmp_path), machines.address(0)], **pipes)
        told = hub.stdout.readline()
        peer = machines.popen(1, [*worker, "peer", told], **pipes)
        seen = json.loads(peer.communicate(timeout=LIMIT)[0])
        hub.communicate(timeout=LIMIT)
    print(f"\n{rate}, {latency}: {seen}")
    for direction in ("up_bps", "down_bps"):
        payload = float(rate.removesuffix("mbps")) * 1e6 * PAYLOAD_SHARE
        assert seen[direction] == pytest.approx(payload, rel=0.15)
    assert seen["took_s"] < 12
    one_way = float(latency.removesuffix("ms")) / 1000
    assert 2 * one_way < seen["latency_s"] < 2 * one_way + 0.1


def report(**changes):
    processor = ProcessorReport(device="a processor", threads=2, flops=1e11, memory_nbytes=10**9)
    facts = {"processor": processor, "up_bps": 2e7, "down_bps": 8e7, "latency_s": 0.02, "versions": {"torch": "2.13"}}
    return MachineReport(**facts | changes)


def test_a_report_survives_its_way_to_the_hub_and_nonsense_does_not():
    sent = msgspec.msgpack.encode(report())
    assert decode_foreign(sent, MachineReport) == report()
    assert report().machine("p0").down_bps == 8e7
    colours = report(processor=msgspec.structs.replace(report().processor, device_class="\x1b[31mcpu"))
    colours = decode_foreign(msgspec.msgpack.encode(colours), MachineReport)
    assert colours.place("p0", [0]).device_class == colours.machine("p0").device_class == " [31mcpu"
    nonsense = [msgspec.structs.replace(report(), up_bps=0.0), msgspec.structs.replace(report(), latency_s=-1.0)]
    texts = [msgspec.msgpack.encode(bad) for bad in nonsense]
    texts += [sent.replace(msgspec.msgpack.encode(2e7), msgspec.msgpack.encode(bad)) for bad in (float("nan"), 1e400)]
    far_too_long = msgspec.structs.replace(report().processor, device_class="x" * 201)
    texts.append(msgspec.msgpack.encode(msgspec.structs.replace(report(), processor=far_too_long)))
    for bad in texts:
        assert bad != sent
        with pytest.raises(ProtocolError):
            decode_foreign(bad, MachineReport)
