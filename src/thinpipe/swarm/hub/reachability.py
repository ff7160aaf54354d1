"""Whether people elsewhere can reach the hub's address: tried by those who join, from where they are.

A peer tries the address of its invite and says how that went. From where it came is not taken from the peer but from
the hub's own server. Whoever came from another network than the hub's shows that others can too.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

import msgspec

from thinpipe.core.foreign import decode_foreign
from thinpipe.swarm.protocol.messages import ReachReply, ReachRequest

AddressesOf = Callable[[str], Awaitable[Collection[str]]]
"""Addresses from which the server sees a peer's connections."""


class Reachability:
    """The service `reach`. Prints what is found for the hub's owner, each finding once; `text` is the newest."""

    def __init__(self, public_url: str, addresses_of: AddressesOf, print_line: Callable[[str], None]) -> None:
        parts = urlsplit(public_url)
        self._host, self._address = parts.hostname or "", parts.netloc
        self._addresses_of, self._print = addresses_of, print_line
        self._found: set[str] = set()
        self._own: set[str] = set()
        """Addresses of the hub's host name, once they are known."""
        self.text = ""
        """The newest finding, in words, without anybody's address; empty: nobody has tried yet."""

    async def __call__(self, peer: str, data: bytes) -> bytes:
        request = decode_foreign(data, ReachRequest)
        seen = next(iter(sorted(await self._addresses_of(peer))), "")
        self._own = self._own or await asyncio.to_thread(_addresses, self._host)
        kind, text = self._judge(peer, request, seen, self._own)
        if kind and kind not in self._found and not (kind == "inside" and "outside" in self._found):
            self._found.add(kind)
            self.text = text.replace(f" ({seen})", "")  # all peers read it, whose addresses are not for each other
            self._print(text)
        return msgspec.msgpack.encode(ReachReply(text=text))

    def _judge(self, peer: str, request: ReachRequest, seen: str, own: Collection[str]) -> tuple[str, str]:
        """Kind and words of what this attempt shows; both empty: nothing, as for a hub of this machine alone.
        `own`: addresses of the hub's host name."""
        if any(ip_address(one).is_loopback for one in own):
            return "", ""
        where = f"{peer} ({seen})" if seen else peer
        outside = _is_global(seen) and seen not in own
        if request.address != self._address:
            text = f"{where} came by {request.address}; the invites have {self._address}, which it did not try"
            return "other address", text
        if request.outcome == "another_certificate":
            return request.outcome, (
                f"what answers at {self._address}, tried by {where}, is not this hub: check to which machine the "
                "router forwards the port, and where the name leads"
            )
        if request.outcome == "unreachable":
            return request.outcome, (
                f"{where} came by another way and cannot reach {self._address} ({request.error}). "
                + ("Forward the port, and open it in the firewall" if outside else _NO_WAY_BACK)
            )
        if outside:
            return "outside", f"{self._address} was reached from outside the hub's network, by {where}: others can too"
        unknown = "; whether it can be from outside, nobody has tried yet" if any(map(_is_global, own)) else ""
        return "inside", f"{self._address} was reached from inside the hub's network, by {where}{unknown}"


_NO_WAY_BACK = (
    "Many routers do not lead back in what comes from inside, so this does not tell whether people elsewhere can"
)


def _is_global(address: str) -> bool:
    parsed: IPv4Address | IPv6Address | None = None
    with suppress(ValueError):
        parsed = ip_address(address)
    return parsed is not None and parsed.is_global


def _addresses(host: str) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:  # the hub may be unable to look up its own name
        return set()
