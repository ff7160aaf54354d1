"""Web page of a run (ASGI): a static HTML file, and snapshots as server-sent events whenever the event log grows.

Read-only: it reads nothing but the event log and accepts no commands.
"""

import asyncio
import base64
import contextlib
import hashlib
import re
import sys
import time
from collections.abc import AsyncIterator, Collection
from importlib.resources import files
from ipaddress import ip_address

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from thinpipe.monitor.log_follower import POLL_SECONDS, LogFollower
from thinpipe.monitor.snapshot import Snapshot

_KEEPALIVE_SECONDS = 15.0
_SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


class PageUpdate(msgspec.Struct, frozen=True):
    """Message to the browser."""

    now_s: float
    """Time of this machine, in seconds since 1970; comparable with the log's times if the log is written on this
    machine."""
    snapshot: Snapshot


class Page:
    """Web page of one run. Polls the log once for all connected browsers."""

    def __init__(self, follower: LogFollower) -> None:
        self._follower = follower
        self._html = (files("thinpipe.monitor") / "page.html").read_text(encoding="utf-8")
        self._headers = {**_SECURITY_HEADERS, "Content-Security-Policy": _policy(self._html)}
        self._version, self._changed = 0, asyncio.Condition()
        self._last_error = ""

    def application(self, names: Collection[str]) -> Starlette:
        """ASGI application. `names`: host names of this machine; requests for others are refused (`HostCheck`)."""
        routes = [Route("/", self._page), Route("/events", self._events), Route("/snapshot.json", self._now)]
        guard = Middleware(HostCheck, names=names)
        return Starlette(routes=routes, middleware=[guard], lifespan=self._polling)

    @contextlib.asynccontextmanager
    async def _polling(self, _app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            task.cancel()

    async def _poll(self) -> None:
        while True:
            if self._read():
                async with self._changed:
                    self._version += 1
                    self._changed.notify_all()
            await asyncio.sleep(POLL_SECONDS)

    def _read(self) -> bool:
        """Polls the log; True if there are new events. A repeated error is printed once; the next poll tries again."""
        try:
            news = bool(self._follower.poll())
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if problem != self._last_error:
                print(f"thinpipe: the web page cannot read the event log: {problem}", file=sys.stderr)
            self._last_error = problem
            return False
        self._last_error = ""
        return news

    def _update(self) -> bytes:
        return msgspec.json.encode(PageUpdate(time.time(), self._follower.run_state.snapshot()))

    async def _page(self, _request: Request) -> Response:
        return HTMLResponse(self._html, headers=self._headers)

    async def _now(self, _request: Request) -> Response:
        return Response(self._update(), media_type="application/json", headers=_SECURITY_HEADERS)

    async def _events(self, _request: Request) -> Response:
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=_SECURITY_HEADERS)

    async def _stream(self) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        while True:
            seen = self._version
            yield b"data: " + self._update() + b"\n\n"
            while seen == self._version:
                try:
                    async with asyncio.timeout(_KEEPALIVE_SECONDS), self._changed:
                        await self._changed.wait_for(lambda seen=seen: self._version != seen)  # type: ignore[misc]
                except TimeoutError:
                    yield b": keep-alive\n\n"


def _policy(html: str) -> str:
    """Content-Security-Policy: no external resources; inline script and style only by their hashes."""
    script, style = (_hash(html, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(html: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"


class HostCheck:
    """ASGI middleware that answers 400 unless the Host header is a name of this machine or an IP address. Protects
    against DNS rebinding."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_allowed(Headers(scope=scope).get("host", "")):
            await PlainTextResponse("host not allowed: not a name of this machine", status_code=400)(
                scope, receive, send
            )
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, header: str) -> bool:
        host = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
        return host.lower().rstrip(".") in self._names or _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
