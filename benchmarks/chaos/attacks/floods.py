"""Floods: as many messages as the socket takes, over a connection of their own with the member's key."""

import asyncio
import time

import msgspec

from benchmarks.chaos.attacks.insider import Insider
from benchmarks.chaos.attacks.order import Order
from benchmarks.chaos.attacks.requests import afterwards
from thinpipe.swarm.broker.authority import PEER_MESSAGE_NBYTES
from thinpipe.transport.nats.activity import Heartbeat
from thinpipe.transport.nats.store_messages import StoreRequest

_HEADER_ROOM_NBYTES = 300


def flood_store(insider: Insider, order: Order) -> str:
    insider.wait_for_place()
    request = StoreRequest(what="wait", keys=["never"], value=bytes((2 << 20) - _HEADER_ROOM_NBYTES), wait_seconds=3600)
    return _flood(insider, order, "hub.{me}.store", msgspec.msgpack.encode(request))


def flood_heartbeats(insider: Insider, order: Order) -> str:
    heartbeat = Heartbeat(incarnation=insider.process.incarnation, generation=insider.process.generation)
    return _flood(insider, order, "hub.{me}.heartbeat", msgspec.msgpack.encode(heartbeat))


def flood_payloads(insider: Insider, order: Order) -> str:
    return _flood(insider, order, "hub.{me}.status", bytes(PEER_MESSAGE_NBYTES))


def flood_neighbour(insider: Insider, order: Order) -> str:
    return _flood(insider, order, f"m.{insider.others[0]}.{{me}}.note", bytes(1 << 20))


def _flood(insider: Insider, order: Order, subject: str, payload: bytes) -> str:
    with insider.by_hand() as me:
        client, sent, began = me.connection._bulk.client, 0, time.monotonic()

        async def flood() -> None:
            nonlocal sent
            while time.monotonic() < began + order.seconds and client.is_connected:
                await client.publish(subject.format(me=me.name), payload)
                sent += 1
                await asyncio.sleep(0)

        try:
            asyncio.run_coroutine_threadsafe(flood(), me.connection._loop).result(order.seconds + 30)
            ended = ""
        except Exception as error:  # hung up on, or not read any more
            ended = f"{type(error).__name__}: {error}; "
        rate = sent * len(payload) / (time.monotonic() - began) / 1e6
        return f"{sent} messages of {len(payload)} bytes, {rate:.1f} MB/s; {ended}{afterwards(me)}"
