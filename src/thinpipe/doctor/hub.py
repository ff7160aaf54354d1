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
from thinpipe.core.numerics import numerics
from thinpipe.core.units import format_bit_rate, utc_text
from thinpipe.doctor.finding import Finding, not_checked, ok, problem, warning
from thinpipe.doctor.run import assigned_memory_finding
from thinpipe.swarm.broker.broker import hub_address
from thinpipe.swarm.broker.server import fingerprint_at
from thinpipe.swarm.peer.bandwidth_probe import Requester, measure_latency, measure_rates
from thinpipe.swarm.peer.clock import CLOCK_FIX, CLOCK_SECONDS, clock_text
from thinpipe.swarm.peer.identity import Identity, load_identity
from thinpipe.swarm.peer.invite_probe import InviteProbe
from thinpipe.swarm.peer.renewal import connect_as_peer
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.names import HUB
from thinpipe.swarm.protocol.status import Status
from thinpipe.transport.nats.connection import Address, HubConnection

_SECONDS = 10.0
_SLOW_BPS = 1e6


def hub_findings(config: DoctorConfig) -> Iterator[Finding]:
    """Findings for the hub given by address, invite or folder; none if no hub is given."""
    if config.hub is not None:
        host, port = config.hub_address()
        yield from _reach(host, port, promised=None)
    elif config.invite is not None:
        try:
            given = _given(config.invite)
        except UserError as error:
            yield problem(
                "invite", str(error), "Copy the whole invite that `thinpipe hub` printed, or ask for a new one."
            )
            return
        parts = urlsplit(given.url)
        reached = list(_reach(parts.hostname or "", parts.port or 0, promised=given.fingerprint))
        yield from reached
        if reached[-1].state == "ok":
            yield from (
                _with_invite(given)
                if isinstance(given, Invite)
                else _with_key(given, Path(config.invite), config.device)
            )


def _given(text: str) -> Invite | Identity | Address:
    """An invite; or who this machine is in the run of this folder, which it has joined or hosts."""
    folder = Path(text)
    if Invite.is_invite(text) or not folder.is_dir():
        return Invite.read(text)
    known = load_identity(folder) or hub_address(folder / "hub")
    if known is None:
        raise UserError(f"{folder} is neither a folder made by `thinpipe join` nor the dump_folder of a hub's run")
    return known


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
            asked = time.time()
            state = probe.check(_SECONDS)
            if state.refusal:
                yield problem("invite", state.refusal, "Ask the hub's owner for a new invite.")
            else:
                yield ok("invite", f"can be used until {utc_text(state.expires_s)}; this check did not use it up")
            yield _versions(probe)
            yield _clock(state.time_s, asked, time.time())
            yield from _who_reads(state.who_reads)
            yield _link(probe)
    except (UserError, ConnectionError, TimeoutError) as error:
        yield problem("invite", str(error), "Ask the hub's owner for a new invite.")


def _versions(probe: InviteProbe) -> Finding:
    """Compares what must be alike on all machines of a run. Line ends and comments of the source are no part of it."""
    mine = numerics()
    try:
        refusal = probe.check(_SECONDS, mine).refusal
    except TimeoutError:
        return not_checked("versions", "this hub is older, and compares them when a machine joins")
    if refusal:
        return problem("versions", refusal, "Install that version, then join.")
    return ok("versions", f"numerics version {mine.version} and torch {mine.torch}, as at the hub")


def _with_key(known: Identity | Address, folder: Path, device: str) -> Iterator[Finding]:
    try:
        dialled = HubConnection(known) if isinstance(known, Address) else connect_as_peer(known, folder)[0]
        with closing(dialled) as connection:
            yield ok("key", f"the hub knows this machine as {known.name}")
            asked = time.time()
            status = decode_foreign(connection.request("status", b"", seconds=_SECONDS), Status)
            yield _clock(status.time_s, asked, time.time())
            yield members_finding(status, known.name)
            yield from _who_reads(status.who_reads)
            yield _link(connection)
        if known.name != HUB:
            mine = next((peer.segments for peer in status.peers if peer.name == known.name), 0)
            yield assigned_memory_finding(folder, mine, device)
    except (UserError, ConnectionError, TimeoutError) as error:
        fix = "Check that `thinpipe hub` is running; if this machine was removed from the run, ask for a new invite."
        yield problem("key", str(error), fix)


def _clock(hub_s: float, asked: float, answered: float) -> Finding:
    """Clock difference; the hub read its clock at some time between `asked` and `answered`."""
    if not hub_s:
        return not_checked("clock", "this hub does not report its clock")
    apart = (asked + answered) / 2 - hub_s
    if abs(apart) > CLOCK_SECONDS + answered - asked:
        return warning("clock", clock_text(apart), CLOCK_FIX)
    return ok("clock", clock_text(apart))


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


def _who_reads(sentence: str) -> Iterator[Finding]:
    """Nothing if the hub is too old to say it."""
    if sentence:
        yield ok("data", sentence)


def _link(connection: Requester) -> Finding:
    latency, rates = measure_latency(connection), measure_rates(connection)
    up, down = format_bit_rate(rates.up_bps), format_bit_rate(rates.down_bps)
    text = f"{up} up, {down} down, {1e3 * latency:.0f} ms round trip"
    if min(rates.up_bps, rates.down_bps) < _SLOW_BPS:
        return warning("link", text, "Stop what else uses the link: below 1 Mbps it slows down the whole run.")
    return ok("link", text)
