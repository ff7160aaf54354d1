"""Asks a running server to read its settings again, through the account that the server keeps for itself."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from thinpipe.core.errors import UserError
from thinpipe.transport.nats.dial import connect

_SECONDS = 20.0
_CLOSE_SECONDS = 1.0


def ask_to_reload(url: str, fingerprint: str, admin_seed: str) -> str | None:
    """Why the server refuses its new settings, or None. A ConnectionError when it could not be asked.

    In a thread of its own: the caller's may have an event loop, which cannot be entered twice.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _ask(url, fingerprint, admin_seed)).result()


async def _ask(url: str, fingerprint: str, admin_seed: str) -> str | None:
    from nats.errors import Error

    try:
        async with asyncio.timeout(_SECONDS):
            client = await connect(url, fingerprint, admin_seed, inbox="_INBOX.admin", on_down=lambda _: None)
            try:
                server = json.loads((await client.request("$SYS.REQ.SERVER.PING.IDZ", timeout=5)).data)["id"]
                reply = json.loads((await client.request(f"$SYS.REQ.SERVER.{server}.RELOAD", timeout=10)).data)
            finally:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await client.close()
    except (UserError, Error, TimeoutError) as error:
        raise ConnectionError(str(error) or "no answer in time") from error
    return str(reply["error"]) if reply.get("error") else None
