"""A real hub whose services fail, and whose own connection to its server is lost."""

import asyncio
import json

import msgspec
import pytest

from tests.programs import PATIENCE
from tests.swarm.brokers import dialled
from tests.swarm.commits import wait_until
from tests.swarm.hubs import ask_as, begin_generation, running_hub
from thinpipe.swarm.hub.disconnects import Disconnects
from thinpipe.swarm.hub.services.serve import Services
from thinpipe.swarm.protocol.messages import TokensRequest
from thinpipe.swarm.protocol.names import HUB
from thinpipe.swarm.protocol.status import Status
from thinpipe.transport.nats.service_error import HubFailedError


def test_a_service_that_raises_answers_at_once_and_is_counted(run_config, monkeypatch, caplog):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        begin_generation(running, connection)

        def fail(*_request):
            raise ZeroDivisionError("no tokens today")

        monkeypatch.setattr(running.hub.run_host, "tokens", fail)
        request = msgspec.msgpack.encode(TokensRequest(split="train", index=0))
        for _ in range(3):
            with pytest.raises(HubFailedError, match=r"the hub failed .*\(tokens\).*hub\.log"):
                connection.request("tokens", request, seconds=PATIENCE)
        status = ask_as(connection, "status", 0, Status)
        assert status.troubles == ["the service `tokens` failed 3 times: see hub.log"]
        told = [line for line in running.printed if "failed when p0 asked it" in line]
        assert len(told) == 1
        assert "no tokens today" in told[0]
        tracebacks = [record for record in caplog.records if "a request of p0" in record.message and record.exc_info]
        assert len(tracebacks) == 2, "the first and the second: a peer may cause as many as it likes"


async def cut_hub(running):
    """The server ends the hub's connection, as it does when too much waits for it."""
    broker = running.hub.broker
    async with dialled(broker, "admin", broker.admin_credentials) as (client, _):
        server = json.loads((await client.request("$SYS.REQ.SERVER.PING.IDZ", timeout=60)).data)["id"]
        question = json.dumps({"subscriptions": True}).encode()
        found = json.loads((await client.request(f"$SYS.REQ.SERVER.{server}.CONNZ", question, timeout=60)).data)
        for each in found["data"]["connections"]:
            if f"hub.{HUB}.status" in each.get("subscriptions_list", ()):
                asked = json.dumps({"cid": each["cid"]}).encode()
                await client.request(f"$SYS.REQ.SERVER.{server}.KICK", asked, timeout=60)
                return
        raise AssertionError("the hub has no connection")


def test_a_hub_that_its_server_has_cut_off_comes_back(run_config):
    """Its peers, which are not cut off, compute on in the same generation."""
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        begin_generation(running, connection)
        for number in range(1, 3):
            asyncio.run(cut_hub(running))
            assert ask_as(connection, "status", 0, Status).generation == 1
            wait_until(lambda number=number: sum("connected again" in line for line in running.printed) == number)
        assert any("lost the connection to its own server" in line for line in running.printed)
        assert ask_as(connection, "status", 0, Status).generation == 1


def test_nobody_is_answered_before_the_hub_knows_who_is_connected(run_config, monkeypatch):
    """A request to `reach` between the two was a fault of the hub."""
    opened = []
    for kind in (Disconnects, Services):
        first = kind.open

        async def noted(self, *arguments, kind=kind, first=first):
            await first(self, *arguments)
            opened.append(kind)

        monkeypatch.setattr(kind, "open", noted)
    with running_hub(run_config, ("p0",)):
        assert opened[0] is Disconnects
        assert Services in opened
