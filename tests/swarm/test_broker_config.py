import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.core.errors import UserError
from thinpipe.swarm.broker.certificate import load_or_create_certificate
from thinpipe.swarm.broker.config import BrokerConfig, Limits, render
from thinpipe.swarm.broker.server import find_server
from thinpipe.swarm.protocol.keys import KeyPair

HUB, ADMIN, *KEYS = (KeyPair.new().public_key for _ in range(8))


def config(**changes):
    settings = {
        "host": "127.0.0.1",
        "port": 4222,
        "certificate": Path("/run/hub.crt"),
        "private_key": Path("/run/hub.key"),
        "store": Path("/run/jetstream"),
        "log": Path("/run/server.log"),
        "hub_key": HUB,
        "admin_key": ADMIN,
    }
    return BrokerConfig(**settings | changes)


EMPTY = render(config()).splitlines()

hostile = st.one_of(
    st.text(max_size=40),
    st.text('ab0.>*"}]{[\n\r\t $#\\,:=', max_size=40),
    st.from_regex(r"[a-z0-9]{1,33}[\n\x00 ]?", fullmatch=True),
    st.sampled_from(["p0", "hub", "include 'x'", "p0\n", "p0.>", "*", ">", "$HOME", "p٣", "P0", "", "a" * 33]),
)
keys = st.sampled_from(KEYS) | st.builds(str.__add__, st.sampled_from(KEYS), hostile) | hostile


@given(st.dictionaries(hostile, keys, max_size=3), st.dictionaries(hostile, keys, max_size=3))
def test_no_name_and_no_key_adds_more_than_its_own_user(peers, invites):
    try:
        lines = render(config(peers=peers, invites=invites)).splitlines()
    except UserError:
        return
    users = [line for line in lines if line not in EMPTY]
    assert len(lines) == len(EMPTY) + len(peers) + len(invites)
    assert users == [
        *(peer_line(name, peers[name]) for name in sorted(peers)),
        *(invite_line(name, invites[name]) for name in sorted(invites)),
    ]
    assert all(name.isascii() and name.isalnum() and name != "hub" for name in (*peers, *invites))
    assert all(key in KEYS for key in (*peers.values(), *invites.values()))


DENIED = '["$JS.>", "$KV.>", "$O.>", "$SYS.>"]'


def peer_line(name, key):
    publish = f'{{allow: ["m.*.{name}.>", "hub.{name}.>"], deny: {DENIED}}}'
    subscribe = f'["m.{name}.>", "_INBOX.{name}.>", "bcast.>"]'
    return f"      {{nkey: {key}, permissions: {{publish: {publish}, subscribe: {subscribe}}}}}"


def invite_line(name, key):
    publish = f'{{allow: ["join.{name}"], deny: {DENIED}}}'
    return f'      {{nkey: {key}, permissions: {{publish: {publish}, subscribe: ["_INBOX.{name}.>"]}}}}'


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_host_and_no_folder_adds_a_line(host, folder):
    try:
        lines = render(config(host=host, store=Path("/", folder))).splitlines()
    except UserError:
        return
    assert len(lines) == len(EMPTY)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": {"hub": KEYS[0]}}, "'hub'"),
        ({"peers": {"p0": KEYS[0]}, "invites": {"p0": KEYS[1]}}, "p0 is the name of a peer and of an invite"),
        ({"peers": {"p0": KEYS[0], "p1": KEYS[0]}}, "same key"),
        ({"peers": {"p0": HUB}}, "same key"),
        ({"peers": {"p0": "UABC"}}, "public key"),
        ({"host": "localhost\nport: 1"}, "address to listen on"),
        ({"port": 0}, "not a port"),
        ({"port": True}, "not a port"),
        ({"port": "4222\nx"}, "not a port"),
        ({"store": Path("/a\nb")}, "another folder"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        render(config(**changes))


@pytest.mark.parametrize(
    "changes", [{"connections": 0}, {"payload_nbytes": "8MB"}, {"payload_nbytes": 2, "pending_nbytes": 1}]
)
def test_limits_make_sense(changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        Limits(**changes)


@pytest.mark.parametrize("folder", ["plain", 'with " and \\ and # $HOME', "ümläut 流"])
def test_the_server_understands_it(tmp_path, folder):
    folder = tmp_path / folder
    folder.mkdir()
    certificate = load_or_create_certificate(folder)
    text = render(
        config(
            certificate=certificate.path,
            private_key=certificate.key_path,
            store=folder / "jetstream",
            peers={"p0": KEYS[0], "0": KEYS[1], "true": KEYS[2]},
            invites={"1e5": KEYS[3]},
        )
    )
    (folder / "server.conf").write_text(text, encoding="utf-8")
    asked = [find_server(), "-t", "-c", folder / "server.conf"]
    checked = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stderr
