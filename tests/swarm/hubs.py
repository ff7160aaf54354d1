"""A real hub of a real run in this process, for tests that drive its peers by hand."""

import asyncio
import gc
import io
import threading
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import msgspec
from rich.console import Console

from tests.programs import PATIENCE
from tests.swarm.brokers import running_broker
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.hub.server import Hub
from thinpipe.swarm.hub.training_host import TrainingHost
from thinpipe.swarm.peer.identity import Identity
from thinpipe.swarm.protocol.machine_report import MachineReport, ProcessorReport
from thinpipe.swarm.protocol.messages import Answer, NextRequest, Standby
from thinpipe.training.console import LineDisplay
from thinpipe.transport.nats.client import Credentials
from thinpipe.transport.nats.connection import Address, HubConnection


@dataclass(frozen=True)
class RunningHub:
    hub: Hub
    credentials: dict[str, Credentials]
    printed: list[str]
    """Lines for the hub's owner."""
    faults: list[dict]
    """What the hub's event loop complains of."""
    loop: asyncio.AbstractEventLoop

    def connection(self, name, incarnation="a"):
        broker = self.hub.broker
        address = Address(url=broker.url, fingerprint=broker.fingerprint, name=name, credentials=self.credentials[name])
        return closing(HubConnection(address, incarnation=incarnation))


@contextmanager
def running_hub(config, peers=("p0", "p1"), **settings):
    """`peers` belong already; the hub's link is given as fast, so that nobody has to measure it; and nobody is lost
    because this machine is slow."""
    printed, faults, begun = [], [], threading.Event()
    with running_broker(config.job.dump_folder, peers) as running:
        display, keep_ends = LineDisplay(Console(file=io.StringIO()), log_freq=1), settings.get("keep_ends", ())
        run_host = TrainingHost(config, display, use_all_peers=True, keep_ends=keep_ends)
        every = {"run": "r", "public_url": running.url, "peers": len(peers), "hub_bps": (1e9, 1e9)}
        every |= {"heartbeat_timeout_seconds": 120.0} | settings
        hub = Hub(running.broker, run_host, HubOptions(**every), printed.append)
        tasks = []

        async def begin(_hub):
            begun.set()

        async def main():
            asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
            tasks.append((asyncio.get_running_loop(), asyncio.current_task()))
            with suppress(asyncio.CancelledError):
                await hub.run(begin)
            gc.collect()  # an error that nobody took is told when its task is thrown away

        thread = threading.Thread(target=asyncio.run, args=(main(),))
        thread.start()
        try:
            assert begun.wait(PATIENCE)
            loop, task = tasks[0]
            yield RunningHub(hub, running.credentials, printed, faults, loop)
        finally:
            with suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(task.cancel)
            thread.join(PATIENCE)
            run_host.close()
    assert not thread.is_alive(), "the hub does not end"
    assert not faults, faults


def identity_of(address):
    """Of the peer with this address, as its folder has it."""
    return Identity(
        run="r",
        invite="i",
        url=address.url,
        fingerprint=address.fingerprint,
        name=address.name,
        seed=address.credentials.seed,
        jwt=address.credentials.jwt,
        renewal="",
    )


def report(flops=1e9, memory_nbytes=1 << 40):
    processor = ProcessorReport(
        device="cpu", device_class="cpu: one of a kind", threads=1, flops=flops, memory_nbytes=memory_nbytes
    )
    return MachineReport(processor=processor, up_bps=1e9, down_bps=1e9, latency_s=0.01, versions={})


def next_request(running, **fields):
    request = NextRequest(
        **{"incarnation": "a", "numerics": running.hub.run_host.numerics, "report": report()} | fields
    )
    return msgspec.msgpack.encode(request)


def ask_next(connection, running, *, seconds=PATIENCE, **fields):
    return msgspec.msgpack.decode(
        connection.request("next", next_request(running, **fields), seconds=seconds), type=Answer
    )


def ask_as(connection, service, message, kind, seconds=PATIENCE):
    return msgspec.msgpack.decode(
        connection.request(service, msgspec.msgpack.encode(message), seconds=seconds), type=kind
    )


def ask_again(connection, running, **fields):
    """What comes after having waited for as long as the hub wants."""
    while isinstance(answer := ask_next(connection, running, **fields), Standby):
        pass
    return answer


def begin_generation(running, *posts):
    """All ask what to do; each is told to work. The first has the slowest machine, so it comes first."""
    reports = [report(flops=1e9 * 2**index) for index in range(len(posts))]
    asked = [
        connection.submit("next", next_request(running, report=each), seconds=PATIENCE)
        for connection, each in zip(posts, reports, strict=True)
    ]
    answers = [msgspec.msgpack.decode(answer.result(PATIENCE), type=Answer) for answer in asked]
    return [
        ask_again(connection, running, report=each) if isinstance(answer, Standby) else answer
        for connection, each, answer in zip(posts, reports, answers, strict=True)
    ]
