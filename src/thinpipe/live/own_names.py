"""Answers a browser only where it asks for this machine by a name of its own, or by an address: so a page of another
site, whose name was made to lead here (DNS rebinding), reads nothing."""

from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class OwnNames:
    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_ours(Headers(scope=scope).get("host", "")):
            await PlainTextResponse("not a name of this machine", status_code=400)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_ours(self, header: str) -> bool:
        host = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
        return host.lower().rstrip(".") in self._names or _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
