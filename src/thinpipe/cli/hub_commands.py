"""`thinpipe status`, `thinpipe invite` and `thinpipe kick`: requests to the hub of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console

from thinpipe.config.hub import InviteConfig, KickConfig, StatusConfig
from thinpipe.core.errors import UserError
from thinpipe.core.events import Stopped, read_events
from thinpipe.core.foreign import decode_foreign
from thinpipe.core.run_folder import events_path, refuse_missing_run
from thinpipe.swarm.broker.broker import hub_address
from thinpipe.swarm.peer.identity import load_identity
from thinpipe.swarm.peer.renewal import connect_as_peer
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.invite_text import invite_text
from thinpipe.swarm.protocol.messages import AdminAnswer, AdminRequest
from thinpipe.swarm.protocol.status import Status, render
from thinpipe.transport.nats.client import UnreachableError
from thinpipe.transport.nats.connection import HubConnection

_SECONDS = 15.0


def status(config: StatusConfig) -> None:
    try:
        found = ask_status(config.folder)
    except UnreachableError:
        if not _has_finished(config.folder):
            raise
        print(f"finished; `thinpipe report {config.folder}` writes a report of the run")
        return
    if config.json:
        print(msgspec.json.encode(found).decode())
    else:
        Console(highlight=False, markup=False).print(render(found))


def ask_status(folder: Path) -> Status:
    """Status from the hub. `folder`: that of the hub's run, or of a peer that joined it."""
    with _connection(folder) as connection:
        return decode_foreign(connection.request("status", b"", seconds=_SECONDS), Status)


def _has_finished(folder: Path) -> bool:
    """True if the last stop in the hub's event log has the reason "finished"."""
    log = events_path(folder)
    ends = [event.reason for event in read_events(log) if isinstance(event, Stopped)] if log.is_file() else []
    return ends[-1:] == ["finished"]


def invite(config: InviteConfig) -> None:
    if config.revoke:
        print(_admin(config.folder, "revoke", config.revoke))
    elif config.list:
        print(_admin(config.folder, "list"))
    else:
        print(invite_text(Invite.read(_admin(config.folder, "invite"))))


def kick(config: KickConfig) -> None:
    print(_admin(config.folder, "kick", config.peer))


def _admin(folder: Path, what: Literal["invite", "list", "revoke", "kick"], name: str = "") -> str:
    refuse_missing_run(folder)
    if hub_address(folder / "hub") is None:
        raise UserError(
            f"{folder} is not the dump_folder of a hub's run: only the hub's owner can invite or remove peers"
        )
    with _connection(folder) as connection:
        request = msgspec.msgpack.encode(AdminRequest(what=what, name=name))
        answer = decode_foreign(connection.request("admin", request, seconds=_SECONDS), AdminAnswer)
    if answer.refusal:
        raise UserError(answer.refusal)
    return "\n".join(filter(None, (answer.text, *answer.lines)))


@contextmanager
def _connection(folder: Path) -> Iterator[HubConnection]:
    """Connection with the credentials in the folder: the hub owner's, else the peer's. Raises UserError if there are
    none, or if the hub does not answer."""
    refuse_missing_run(folder)
    identity, address = load_identity(folder), hub_address(folder / "hub")
    if address is None and identity is None:
        raise UserError(f"{folder} is neither the dump_folder of a hub's run nor a folder made by `thinpipe join`")
    if address is not None:
        connection = HubConnection(address)
    else:
        assert identity is not None
        connection, _ = connect_as_peer(identity, folder)
    try:
        yield connection
    except (ConnectionError, TimeoutError) as error:
        raise UserError(f"the hub does not answer ({error}): check that `thinpipe hub` is running") from error
    finally:
        connection.close()
