"""What a join and a kick cost a hub that has thousands of members: seconds, and who else is disturbed.

    python -m benchmarks.members --output benchmarks/results/members

A real nats-server and the hub's real admission on one machine: the members are entered in the register before, some of
them are connected, and all run in this process, whose load is part of what is measured. Nobody connected may notice
anything but the kick of its own key.
"""

import asyncio
import resource
import statistics
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.hub_load import processor_seconds
from benchmarks.hub_pages import head, origin, write
from thinpipe.core.numerics import Numerics
from thinpipe.swarm.broker.broker import Broker
from thinpipe.swarm.broker.register import Member
from thinpipe.swarm.hub.admission import Admission
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.peer.accept_invite import accept_invite
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.transport.nats.client import Credentials, connect
from thinpipe.transport.nats.direct_client import DirectClient

REVOKED = (0, 5000)
"""Keys that were revoked before."""
NUMERICS = Numerics(version=1, torch="2.1.0")
_AT_ONCE = 20
Result = TypeVar("Result")


class Crowd:
    """Connected members, on an event loop in a thread of its own, with the hub's admission."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._loop = broker, asyncio.new_event_loop()
        self._clients: dict[str, DirectClient] = {}
        self.cut_at: dict[str, float] = {}
        """When each connection that was lost, or had any other problem, reported it first."""
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def call(self, pending: Awaitable[Result]) -> Result:
        async def run() -> Result:
            return await pending

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def connect(self, members: dict[str, KeyPair]) -> None:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str, key: KeyPair) -> None:
            async with turns:
                jwt = self._broker.authority.peer_jwt(name, key.public_key)
                credentials = Credentials(seed=key.seed, jwt=jwt)

                def on_down(_error: Exception) -> None:
                    self.cut_at.setdefault(name, time.monotonic())

                url, fingerprint = self._broker.url, self._broker.fingerprint
                self._clients[name] = await connect(
                    url, fingerprint, credentials, inbox=f"_INBOX.{name}", on_down=on_down
                )

        await asyncio.gather(*(one(name, key) for name, key in members.items()))

    async def open_admission(self) -> Admission:
        broker = self._broker
        client = await connect(
            broker.url, broker.fingerprint, broker.hub_credentials, inbox="_INBOX.hub", on_down=lambda _error: None
        )
        options = HubOptions(run="r", public_url=broker.url, peers=1)
        admission = Admission(broker, options, numerics=NUMERICS, print_line=lambda _text: None)
        await admission.open(client)
        return admission

    async def check(self, names: list[str]) -> int:
        """Members among these that cannot send to themselves, and hear it, any more."""
        failed = 0
        for name in names:
            client = self._clients[name]
            try:
                mail = await client.subscribe(f"m.{name}.{name}.d")
                await client.publish(f"m.{name}.{name}.d", b"x")
                await mail.next_msg(timeout=60)
            except Exception:
                failed += 1
        return failed

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()), return_exceptions=True)


def enter(folder: Path, members: dict[str, KeyPair], revoked: int) -> None:
    """Writes the register of a hub that has these members, before its first start."""
    table = {
        "members": {name: Member(public_key=key.public_key) for name, key in members.items()},
        "revoked": [KeyPair.new().public_key for _ in range(revoked)],
    }
    folder.mkdir(parents=True)
    (folder / "members.json").write_bytes(msgspec.json.encode(table))


@contextmanager
def crowded_hub(folder: Path, members: int, connected: int, revoked: int) -> Iterator[tuple[Broker, Crowd, float]]:
    """A hub with its members, and how many seconds its server took to start."""
    keys = {f"p{number}": KeyPair.new() for number in range(members)}
    enter(folder / "hub", keys, revoked)
    began = time.monotonic()
    with Broker(folder / "hub") as broker:
        started = time.monotonic() - began
        crowd = Crowd(broker)
        crowd.call(crowd.connect(dict(list(keys.items())[:connected])))
        yield broker, crowd, started
        crowd.call(crowd.close())


def timed(action: Callable[[], object], broker: Broker) -> tuple[float, float]:
    """Seconds by the clock, and of the server's processor."""
    began, used = time.monotonic(), processor_seconds(broker.server_pid)
    action()
    return time.monotonic() - began, processor_seconds(broker.server_pid) - used


def measure(folder: Path, members: int, connected: int, revoked: int, times: int) -> dict[str, Any]:
    with crowded_hub(folder, members, connected, revoked) as (broker, crowd, started):
        admission = crowd.call(crowd.open_admission())
        invites, joins, kicks, cuts = [], [], [], []
        for number in range(times):
            began = time.monotonic()
            invite = crowd.call(admission.invite())
            invites.append(time.monotonic() - began)
            place = folder / f"peer{number}"
            joins.append(timed(lambda: accept_invite(invite, place, name="", numerics=NUMERICS), broker))  # noqa: B023
        for number in range(times):
            name, began = f"p{number}", time.monotonic()
            kicks.append(timed(lambda: broker.remove_peer(name), broker))  # noqa: B023
            while name not in crowd.cut_at:
                time.sleep(0.001)
            cuts.append(crowd.cut_at[name] - began)
        others = [f"p{number}" for number in range(times, connected)]
        failed = crowd.call(crowd.check(others))
        return {
            "members": members,
            "connected": connected,
            "revoked_before": revoked,
            "start_seconds": started,
            "invite_seconds": invites,
            "join_seconds": [seconds for seconds, _ in joins],
            "join_server_seconds": [used for _, used in joins],
            "kick_seconds": [seconds for seconds, _ in kicks],
            "kick_server_seconds": [used for _, used in kicks],
            "cut_seconds": cuts,
            "others_disturbed": len([name for name in others if name in crowd.cut_at]),
            "others_that_failed_to_send": failed,
        }


def row(result: dict[str, Any]) -> str:
    def spread(name: str, digits: int = 3) -> str:
        values = result[name]
        return f"{statistics.median(values):.{digits}f} (at most {max(values):.{digits}f})"

    return (
        f"| {result['members']} | {result['connected']} | {result['revoked_before']} | {result['start_seconds']:.1f} | "
        f"{spread('invite_seconds')} | {spread('join_seconds')} | {spread('join_server_seconds', 4)} | "
        f"{spread('kick_seconds')} | {spread('cut_seconds')} | {spread('kick_server_seconds', 4)} | "
        f"{result['others_disturbed']} | {result['others_that_failed_to_send']} |"
    )


def page(results: list[dict[str, Any]], config: dict[str, Any]) -> str:
    columns = ["members", "connected", "revoked before", "start s", "invite s", "join s", "of the server's processor"]
    columns += ["kick s", "until cut s", "of the server's processor", "others disturbed", "others that cannot send"]
    lines = [
        *head("One more join, one more kick, in a hub of thousands", config),
        f"Medians of {config['times']}, one after the other, on a shared machine with other load. A join is all that",
        "the newcomer does: its key on disk, TLS, question, the hub's entry on disk, answer, its identity on disk. A",
        'kick is on disk and acknowledged by the server; "until cut" is when the kicked connection noticed.',
        "",
        f"| {' | '.join(columns)} |",
        "|" + "---:|" * len(columns),
        *map(row, results),
        "",
        "Before (17 November 2026, static keys in the server's configuration, which each join and each kick wrote and",
        "had reloaded): with 5,000 users, 1,000 of them connected, the reload failed at its limit of 10 s; with 10,000",
        "users and connections it took 2.8 s of the server's processor and 22 s by the clock.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="writes OUTPUT.md and OUTPUT.json")
    parser.add_argument("--members", type=int, default=5000)
    parser.add_argument("--connected", type=int, default=1000)
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for each member that is connected
    config = origin("members") | {"times": options.times}
    results = []
    for revoked in REVOKED:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(Path(folder), options.members, options.connected, revoked, options.times))
            print(row(results[-1]), flush=True)
    write(options.output, page(results, config), config, results)


if __name__ == "__main__":
    main()
