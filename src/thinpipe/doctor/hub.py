"""Checks of the connection to a hub: host name, port, TLS certificate, invite or key, clock, bandwidth, memory.

The checks end at the first failure, since later ones depend on it. An invite is tried but not consumed.
"""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from thinpipe.config.doctor import DoctorConfig
from thinpipe.core.errors import UserError
from thinpipe.core.foreign import decode_foreign
from thinpipe.core.units import format_bit_rate
from thinpipe.doctor.finding import Finding, not_checked, ok, problem, warning
from thinpipe.doctor.run import assigned_memory_finding
from thinpipe.swarm.broker.broker import hub_address
from thinpipe.swarm.broker.server import fingerprint_at
from thinpipe.swarm.peer.bandwidth_probe import Requester, measure_latency, measure_rates
from thinpipe.swarm.peer.identity import load_identity
from thinpipe.swarm.peer.invite_probe import InviteProbe
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.names import HUB
from thinpipe.swarm.protocol.status import Status
from thinpipe.transport.nats.connection import Address, HubConnection

_SECONDS = 10.0
_CLOCK_SECONDS = 60.0
_SLOW_BPS = 1e6


def hub_findings(config: DoctorConfig) -> Iterator[Finding]:
    """Findings for the hub given by address, invite or folder; none if no hub is given."""
    if config.hub is not None:
        host, port = config.hub_address()
        yield from _reach(host, port, promised=None)
    elif config.invite is not None:
        try:
            address, joined = _address(config.invite)
        except UserError as error:
            yield problem(
                "invite", str(error), "Copy the whole invite that `thinpipe hub` printed, or ask for a new one."
            )
            return
        parts = urlsplit(address.url)
        reached = list(_reach(parts.hostname or "", parts.port or 0, promised=address.fingerprint))
        yield from reached
        if reached[-1].state == "ok":
            yield from (
                _with_invite(Invite.read(config.invite))
                if joined is None
                else _with_key(address, joined, config.device)
            )


def _address(given: str) -> tuple[Address, Path | None]:
    """Address of the hub, and the run's folder if this machine has joined or hosts the run (None for an invite)."""
    folder = Path(given)
    if not Invite.is_invite(given) and folder.is_dir():
        identity = load_identity(folder)
        address = identity.address if identity is not None else hub_address(folder / "hub")
        if address is None:
            raise UserError(f"{folder} is neither a folder made by `thinpipe join` nor the dump_folder of a hub's run")
        return address, folder
    invite = Invite.read(given)
    return Address(url=invite.url, fingerprint=invite.fingerprint, name=invite.id, seed=invite.seed), None


def _reach(host: str, port: int, *, promised: str | None) -> Iterator[Finding]:
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except OSError as error:
        yield problem("hub's name", f"{host}: {error}", "Check the address, and that this machine is online.")
        return
    yield ok("hub's name", f"{host} is {', '.join(found)}")
    began = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except OSError as error:
        yield problem(
            "hub's port",
            f"{host}:{port}: {error}",
            "Check that `thinpipe hub` is running, that the hub's firewall and router accept connections to this port, "
            "and that your firewall allows outgoing connections.",
        )
        return
    yield ok("hub's port", f"{port} answers after {1e3 * (time.monotonic() - began):.0f} ms")
    yield _certificate(host, port, promised)


def _certificate(host: str, port: int, promised: str | None) -> Finding:
    try:
        shown = fingerprint_at((host, port), seconds=_SECONDS)
    except (OSError, ssl.SSLError) as error:
        return problem("certificate", f"no TLS at {host}:{port}: {error}", "This is no hub: check address and port.")
    if promised is None:
        return ok("certificate", f"sha256 {shown}", "Compare it with the fingerprint in an invite of this hub.")
    if shown != promised:
        return problem(
            "certificate",
            "the server is not the hub that invited you: its certificate differs from the one in the invite",
            "Ask for a new invite if the hub was set up anew; otherwise somebody intercepts the traffic: do not join.",
        )
    return ok("certificate", f"as promised, sha256 {shown[:16]}...")


def _with_invite(invite: Invite) -> Iterator[Finding]:
    try:
        with InviteProbe(invite) as probe:
            yield ok("invite", "the invite is valid, and this check did not use it up")
            yield not_checked("clock", "the hub's clock can be read only after joining")
            yield _link(probe)
    except (UserError, ConnectionError, TimeoutError) as error:
        yield problem("invite", str(error), "Ask the hub's owner for a new invite.")


def _with_key(address: Address, folder: Path, device: str) -> Iterator[Finding]:
    try:
        with closing(HubConnection(address)) as connection:
            yield ok("key", f"the hub knows this machine as {address.name}")
            asked = time.time()
            status = decode_foreign(connection.request("status", b"", seconds=_SECONDS), Status)
            yield _clock(status, asked, time.time())
            yield members_finding(status, address.name)
            yield _link(connection)
        if address.name != HUB:
            mine = next((peer.segments for peer in status.peers if peer.name == address.name), 0)
            yield assigned_memory_finding(folder, mine, device)
    except (UserError, ConnectionError, TimeoutError) as error:
        fix = "Check that `thinpipe hub` is running; if this machine was removed from the run, ask for a new invite."
        yield problem("key", str(error), fix)


def _clock(status: Status, asked: float, answered: float) -> Finding:
    """Clock difference; the hub read its clock at some time between `asked` and `answered`."""
    if not status.time_s:
        return not_checked("clock", "this hub does not report its clock")
    apart = (asked + answered) / 2 - status.time_s
    text = f"{abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} the hub's clock"
    if abs(apart) > _CLOCK_SECONDS + answered - asked:
        return warning("clock", text, "Turn on network time (NTP): training works, but times in logs are wrong.")
    return ok("clock", text)


def members_finding(status: Status, me: str) -> Finding:
    """What the hub has found of the run's members, this machine (`me`) first."""
    if me in status.suspended:
        return problem(
            "members",
            f"the hub has suspended this machine {status.suspended[me]}",
            "Run `thinpipe selftest` here, and tell the hub's owner what it says. The suspension ends by itself.",
        )
    found = [f"{name} is suspended {why}" for name, why in status.suspended.items()] + status.troubles
    if status.alarms:
        found.insert(0, f"{status.alarms} alarm(s): what members reported cannot be true")
    if found:
        return warning("members", "; ".join(found), "`thinpipe status` shows it; the owner decides (`thinpipe kick`).")
    return ok("members", "nobody is suspended, and the hub disputes nothing")


def _link(connection: Requester) -> Finding:
    latency, rates = measure_latency(connection), measure_rates(connection)
    up, down = format_bit_rate(rates.up_bps), format_bit_rate(rates.down_bps)
    text = f"{up} up, {down} down, {1e3 * latency:.0f} ms round trip"
    if min(rates.up_bps, rates.down_bps) < _SLOW_BPS:
        return warning("link", text, "Stop what else uses the link: below 1 Mbps it slows down the whole run.")
    return ok("link", text)
