"""A PC that asks the hub's store, as a program for tests: arguments as JSON, its credentials in CREDENTIALS."""

import asyncio
import json
import os
import sys

import msgspec

from thinpipe.transport.nats.client import Credentials, connect
from thinpipe.transport.nats.store_messages import StoreReply, StoreRequest


async def ask(url, fingerprint, name, key, value):
    """Puts a value there and reads it back."""
    faults = []
    inbox = f"_INBOX.{name}"
    client = await connect(
        url, fingerprint, Credentials(**json.loads(os.environ["CREDENTIALS"])), inbox=inbox, on_down=faults.append
    )
    try:
        for asked in (StoreRequest(what="set", keys=[key], value=value.encode()), StoreRequest(what="get", keys=[key])):
            answer = await client.request(f"hub.{name}.store", msgspec.msgpack.encode(asked), timeout=120)
        assert not faults
        return msgspec.msgpack.decode(answer.data, type=StoreReply).value.decode()
    finally:
        await client.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask(**json.loads(sys.argv[1])))))
