"""Keys of members and invites against a real server: crashes, kicks, ends, restarts and wrong clocks."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from tests.programs import PATIENCE
from tests.swarm.brokers import dialled, running_broker
from tests.swarm.hub.test_admission import NUMERICS, open_admission
from tests.swarm.hubs import identity_of, running_hub
from thinpipe.cli import main
from thinpipe.core.errors import UserError
from thinpipe.swarm.broker.broker import Broker
from thinpipe.swarm.peer.accept_invite import accept_invite
from thinpipe.swarm.peer.identity import load_identity, save_identity
from thinpipe.swarm.peer.renewal import Renewal, connect_as_peer
from thinpipe.swarm.protocol.invite import GRACE_SECONDS, Invite
from thinpipe.swarm.protocol.jwt import ISSUED
from thinpipe.transport.nats.client import RefusedKeyError
from thinpipe.transport.nats.connection import HubConnection

DAY = 86400.0

NEWCOMER = """
import os, signal, sys, time
shift, dies = float(sys.argv[3]), sys.argv[4] == "dies"
right = time.time
time.time = lambda: right() + shift
from pathlib import Path
from thinpipe.core.numerics import Numerics
from thinpipe.swarm.peer import accept_invite
from thinpipe.swarm.peer.renewal import connect_as_peer
from thinpipe.swarm.protocol.invite import Invite
if dies:
    accept_invite.save_identity = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
folder = Path(sys.argv[2])
identity = accept_invite.accept_invite(
    Invite.read(sys.argv[1]), folder, name="", numerics=Numerics(version=1, torch="2.1.0")
)
connect_as_peer(identity, folder)[0].close()
print("in as", identity.name)
"""


def newcomer(invite, folder, *, shift=0.0, dies=False):
    """A program of its own that joins, with a clock that is wrong by `shift` seconds; what became of it."""
    command = [sys.executable, "-c", NEWCOMER, invite.line(), folder, str(shift), "dies" if dies else "lives"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_who_dies_after_the_invite_was_spent_is_let_in_with_it_again(tmp_path):
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running) as (invite, printed):
        used, folder = invite(), tmp_path / "anna"
        died = newcomer(used, folder, dies=True)
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert running.broker.invites[used.id].used_by == "p0"
        assert load_identity(folder) is None
        (key,) = folder.iterdir()
        assert key.stat().st_mode & 0o077 == 0

        with pytest.raises(UserError, match="this invite was used before, by p0"):
            accept_invite(used, tmp_path / "thief", name="", numerics=NUMERICS)
        came = accept_invite(used, folder, name="", numerics=NUMERICS)
        assert came.name == "p0"
        HubConnection(came.address).close()
        assert list(running.broker.peers) == ["p0"]
        assert printed == ["p0 was admitted with an invite"]
        assert [file.name for file in folder.iterdir()] == ["identity.toml"], "the seed is kept in one place"


@pytest.mark.parametrize("shift", [-DAY, DAY, -400 * DAY, 400 * DAY])
def test_a_newcomers_wrong_clock_is_named_and_locks_nobody_out(tmp_path, shift):
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running) as (invite, _):
        came = newcomer(invite(), tmp_path / "anna", shift=shift)
        assert came.stdout == "in as p0\n", came.stderr
        side = "ahead of" if shift > 0 else "behind"
        assert f"this machine's clock is {abs(shift) / 3600:.1f} h {side} the hub's clock" in came.stderr


@pytest.mark.parametrize("shift", [-DAY, DAY, -400 * DAY, 400 * DAY])
def test_members_get_in_when_the_hubs_clock_was_wrong(run_config, tmp_path, shift):
    """Their JWTs were issued while it was wrong; now it is right."""
    with running_hub(run_config, ("p0",)) as running:
        broker = running.hub.broker
        broker.clock = lambda: time.time() + shift
        public_key = broker.peers["p0"]
        with running.connection("p0") as connection:
            identity = identity_of(connection.address)
        identity = replace(
            identity,
            jwt=broker.authority.peer_jwt("p0", public_key),
            renewal=broker.authority.renewal_jwt("p0", public_key),
        )
        tmp_path.joinpath("p0").mkdir()
        save_identity(tmp_path / "p0", identity)
        broker.clock = time.time
        connection, renewed = connect_as_peer(identity, tmp_path / "p0")
        with closing(connection):
            assert connection.request("status", b"", seconds=PATIENCE)
        assert (renewed.jwt != identity.jwt) == (shift < -90 * DAY), "it had expired"
        assert load_identity(tmp_path / "p0") == renewed


def test_an_invite_ends_by_the_hubs_clock_and_both_clocks_are_told(tmp_path):
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running) as (invite, _):
        ended, known = invite(), invite()
        came = accept_invite(known, tmp_path / "known", name="anna", numerics=NUMERICS)
        running.broker.clock = lambda: time.time() + 8 * DAY
        with pytest.raises(
            UserError, match=r"could be used until .* UTC, and the hub's clock says .* UTC: ask for"
        ) as told:
            accept_invite(ended, tmp_path / "late", name="", numerics=NUMERICS)
        assert "this machine's clock is 192.0 h behind the hub's clock, so one of the two is wrong" in str(told.value)
        tmp_path.joinpath("known/identity.toml").unlink()
        tmp_path.joinpath("known/key.toml").write_text(f'seed = "{came.seed}"\n')
        assert accept_invite(known, tmp_path / "known", name="", numerics=NUMERICS).name == "anna", "who it was before"


def test_long_after_its_end_the_server_itself_refuses_an_invite(tmp_path):
    with running_broker(tmp_path / "hub", ()) as running:
        invite = running.broker.add_invite(url=running.url, run="r", seconds=3 - GRACE_SECONDS)

        async def check():
            async with dialled(running, invite.id, invite.credentials) as (client, faults):
                assert await faults.wait() is not None  # cut when it expires
                assert not client.is_connected

        asyncio.run(check())
        with pytest.raises(RefusedKeyError, match=r"it could be used until .* and this machine's clock says .* UTC"):
            accept_invite(invite, tmp_path / "late", name="", numerics=NUMERICS)


def test_a_revoked_invite_is_refused_and_the_others_are_not(tmp_path):
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running) as (invite, _):
        lost, kept = invite(), invite()
        running.broker.revoke_invite(lost.id)
        with pytest.raises(RefusedKeyError, match="does not accept the key of this invite: it was revoked, or"):
            accept_invite(lost, tmp_path / "thief", name="", numerics=NUMERICS)
        accept_invite(kept, tmp_path / "anna", name="anna", numerics=NUMERICS)
        with pytest.raises(UserError, match=r"to revoke, because anna has used it: `thinpipe kick` removes a peer"):
            running.broker.revoke_invite(kept.id)


def test_a_kick_cuts_one_and_disturbs_nobody(tmp_path):
    with running_broker(tmp_path / "hub", ("p1",)) as running, open_admission(running) as (invite, _):
        used = invite()
        came = accept_invite(used, tmp_path / "bert", name="bert", numerics=NUMERICS)

        async def check():
            people = (
                dialled(running, "bert", came.address.credentials),
                dialled(running, "p1", running.credentials["p1"]),
            )
            async with people[0] as (kicked, faults), people[1] as (other, untouched):
                mail = await other.subscribe("m.p1.*.d")
                await other.flush()
                await asyncio.to_thread(running.broker.remove_peer, "bert")
                assert isinstance(await faults.wait(), ConnectionError)
                assert not kicked.is_connected
                await other.publish("m.p1.p1.d", b"still here")
                assert (await mail.next_msg(timeout=PATIENCE)).data == b"still here"
                assert not untouched

        asyncio.run(check())
        with pytest.raises(RefusedKeyError, match="its owner has removed bert from the run"):
            connect_as_peer(came, tmp_path / "bert")
        with pytest.raises(RefusedKeyError, match="its peer was removed"):
            accept_invite(used, tmp_path / "again", name="", numerics=NUMERICS)


def test_a_hub_that_starts_again_keeps_members_and_revocations(tmp_path):
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running) as (invite, _):
        used, lost, kept = invite(), invite(), invite()
        people = [
            accept_invite(each, tmp_path / name, name=name, numerics=NUMERICS)
            for each, name in ((used, "anna"), (invite(), "bert"))
        ]
        running.broker.remove_peer("bert")
        running.broker.revoke_invite(lost.id)
        folder = running.broker.folder
    with Broker(folder) as again:
        anna, bert = people
        assert list(again.peers) == ["anna"]
        HubConnection(anna.address).close()

        async def sign_in(name, credentials):
            async with dialled(again, name, credentials):
                pass

        asyncio.run(sign_in(kept.id, kept.credentials))
        for refused in ((bert.name, bert.address.credentials), (lost.id, lost.credentials)):
            with pytest.raises(RefusedKeyError):
                asyncio.run(sign_in(*refused))


def test_joins_invites_and_kicks_reload_nothing(tmp_path):
    with running_broker(tmp_path / "hub", ("p0", "p1")) as running, open_admission(running) as (invite, _):
        config = running.broker.folder / "server.conf"
        before = config.stat().st_mtime_ns

        async def check():
            async with dialled(running, "p0", running.credentials["p0"]) as (peer, faults):
                for number in range(5):
                    each = await asyncio.to_thread(invite)
                    await asyncio.to_thread(accept_invite, each, tmp_path / str(number), name="", numerics=NUMERICS)
                await asyncio.to_thread(running.broker.remove_peer, "p1")
                await peer.flush()
                assert not faults

        asyncio.run(check())
        assert config.stat().st_mtime_ns == before
        assert "reload" not in (running.broker.folder / "server.log").read_text().lower()


def test_a_member_that_works_gets_new_jwts_and_its_connection_goes_on(run_config, tmp_path):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        broker, renewed, enough = running.hub.broker, [], threading.Event()
        broker.clock = lambda: time.time() + 60 * (1 + len(renewed))  # so that each has another end
        save_identity_of(connection, tmp_path)

        def on_renewed(jwt):
            renewed.append(jwt)
            if len(renewed) == 3:
                enough.set()

        failures = []
        connection.on_failure(failures.append)
        renewal = Renewal(connection, tmp_path, on_renewed, pause_seconds=0.05)
        renewal.start()
        assert enough.wait(PATIENCE)
        renewal.stop()
        assert connection.request("status", b"", seconds=PATIENCE)
        assert not failures
        assert len({*renewed, connection.address.credentials.jwt}) == len(renewed) + 1
        HubConnection(load_identity(tmp_path).address).close()


def save_identity_of(connection, folder):
    save_identity(folder, identity_of(connection.address))


def test_a_member_is_known_with_any_invite_and_spends_none(tmp_path):
    """As after a crash of somebody who has lost the line of the first one."""
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running) as (invite, _):
        assert newcomer(invite(), tmp_path / "anna", dies=True).returncode == -signal.SIGKILL
        another = invite()
        assert accept_invite(another, tmp_path / "anna", name="", numerics=NUMERICS).name == "p0"
        assert not running.broker.invites[another.id].used_by
        assert accept_invite(another, tmp_path / "bert", name="", numerics=NUMERICS).name == "p1"


def test_a_full_disk_at_the_hub_spends_no_invite(tmp_path, monkeypatch):
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running) as (invite, _):
        one = invite()

        def full(*_arguments, **_options):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(running.broker, "add_peer", full)
            with pytest.raises(UserError, match=r"No space left on device.*the invite still works"):
                accept_invite(one, tmp_path / "anna", name="", numerics=NUMERICS)
        assert accept_invite(one, tmp_path / "anna", name="", numerics=NUMERICS).name == "p0"


def test_folders_of_an_earlier_thinpipe_say_what_to_do(tmp_path):
    (tmp_path / "broker.toml").write_text('port = 4222\nhub_seed = "SU"\nadmin_seed = "SU"\n[peers]\n')
    with pytest.raises(UserError, match=r"of an earlier thinpipe.*delete this file.*send everybody a new invite"):
        Broker(tmp_path).__enter__()
    (tmp_path / "identity.toml").write_text(
        'run = "r"\ninvite = "i"\nurl = ""\nfingerprint = ""\nname = "a"\nseed = ""\n'
    )
    with pytest.raises(UserError, match=r"of an earlier thinpipe.*ask the hub's owner for a new invite"):
        load_identity(tmp_path)


def test_every_jwt_says_that_it_was_issued():
    """The server takes one that says 0, or nothing, for revoked as soon as anybody is (nats-server 2.15.1)."""
    assert ISSUED > 0


def test_the_owner_lists_and_revokes_invites(run_config, capsys):
    folder = run_config.job.dump_folder

    def owner(*arguments):
        assert main(["invite", str(folder), *arguments]) in (0, None)
        return capsys.readouterr().out.strip()

    with running_hub(run_config, ("p0",)) as running:
        (folder / "hub").symlink_to(running.hub.broker.folder)
        assert owner("--list") == "no invite is open"
        first, second = (Invite.read(owner().splitlines()[1]) for _ in range(2))
        assert re.fullmatch(
            rf"({first.id}|{second.id}): until .* UTC, another 168.0 h", owner("--list").splitlines()[1]
        )
        assert owner("--revoke", first.id) == f"the invite {first.id} was revoked"
        (left,) = owner("--list").splitlines()
        assert left.startswith(f"{second.id}: until ")
        running.hub.broker.clock = lambda: time.time() + 8 * DAY
        assert owner("--list") == "no invite is open"
