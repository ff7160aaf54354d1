"""The page of a run as a web application: one static file, and the picture whenever it changes, as server-sent events.

It reads the event log and nothing else, and takes no orders.
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

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from thinpipe.live.follow import LOOK_SECONDS, Following
from thinpipe.live.own_names import OwnNames
from thinpipe.live.picture import Picture

_STILL_HERE_SECONDS = 15.0
_SECRECY = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


class Shown(msgspec.Struct, frozen=True):
    now_s: float
    """By the clock that the log was written by, if it is of this machine."""
    picture: Picture


class Page:
    """Looks at the log for all who look at the page."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._html = (files("thinpipe.live") / "page.html").read_text(encoding="utf-8")
        self._headers = {**_SECRECY, "Content-Security-Policy": _policy(self._html)}
        self._version, self._changed = 0, asyncio.Condition()
        self._trouble = ""

    def application(self, names: Collection[str]) -> Starlette:
        """`names`: of this machine, by which a browser may ask; another site's name that leads here is none of them."""
        routes = [Route("/", self._page), Route("/events", self._events), Route("/picture.json", self._now)]
        guard = Middleware(OwnNames, names=names)
        return Starlette(routes=routes, middleware=[guard], lifespan=self._looking)

    @contextlib.asynccontextmanager
    async def _looking(self, _app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._look())
        try:
            yield
        finally:
            task.cancel()

    async def _look(self) -> None:
        while True:
            if self._read():
                async with self._changed:
                    self._version += 1
                    self._changed.notify_all()
            await asyncio.sleep(LOOK_SECONDS)

    def _read(self) -> bool:
        """Whether there is news. What goes wrong is said once; the next look may go well."""
        try:
            news = bool(self._following.look())
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                print(f"thinpipe: the page could not read the log: {trouble}", file=sys.stderr)
            self._trouble = trouble
            return False
        self._trouble = ""
        return news

    def _shown(self) -> bytes:
        return msgspec.json.encode(Shown(time.time(), self._following.story.picture()))

    async def _page(self, _request: Request) -> Response:
        return HTMLResponse(self._html, headers=self._headers)

    async def _now(self, _request: Request) -> Response:
        return Response(self._shown(), media_type="application/json", headers=_SECRECY)

    async def _events(self, _request: Request) -> Response:
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=_SECRECY)

    async def _stream(self) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        while True:
            seen = self._version
            yield b"data: " + self._shown() + b"\n\n"
            while seen == self._version:
                try:
                    async with asyncio.timeout(_STILL_HERE_SECONDS), self._changed:
                        await self._changed.wait_for(lambda seen=seen: self._version != seen)  # type: ignore[misc]
                except TimeoutError:
                    yield b": still here\n\n"


def _policy(html: str) -> str:
    """Nothing from elsewhere, and of what is in the page itself only what we wrote."""
    script, style = (_hash(html, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(html: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
