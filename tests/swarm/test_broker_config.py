import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.core.errors import UserError
from thinpipe.swarm.broker.authority import Authority, AuthoritySeeds
from thinpipe.swarm.broker.certificate import load_or_create_certificate
from thinpipe.swarm.broker.config import BrokerConfig, Limits, render
from thinpipe.swarm.broker.server import find_server
from thinpipe.swarm.protocol.keys import KeyPair

AUTHORITY = Authority(AuthoritySeeds.new())


def config(**changes):
    settings = {
        "host": "127.0.0.1",
        "port": 4222,
        "certificate": Path("/run/hub.crt"),
        "private_key": Path("/run/hub.key"),
        "log": Path("/run/server.log"),
        "operator_jwt": AUTHORITY.operator_jwt(),
        "account": AUTHORITY.account,
        "account_jwt": AUTHORITY.account_jwt([]),
        "system_account": AUTHORITY.system_account,
        "system_jwt": AUTHORITY.system_jwt(),
    }
    return BrokerConfig(**settings | changes)


EMPTY = render(config()).splitlines()


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_host_and_no_folder_adds_a_line(host, folder):
    try:
        lines = render(config(host=host, log=Path("/", folder))).splitlines()
    except UserError:
        return
    assert len(lines) == len(EMPTY)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"account": KeyPair.new().public_key}, "not an account's public key"),
        ({"system_account": "A\nport: 1"}, "not an account's public key"),
        ({"account_jwt": 'e30.e30"\nport: 1'}, "no JWT has"),
        ({"operator_jwt": ""}, "no JWT has"),
        ({"host": "localhost\nport: 1"}, "address to listen on"),
        ({"port": 0}, "not a port"),
        ({"port": True}, "not a port"),
        ({"port": "4222\nx"}, "not a port"),
        ({"log": Path("/a\nb")}, "another folder"),
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
            log=folder / "server.log",
        )
    )
    (folder / "server.conf").write_text(text, encoding="utf-8")
    asked = [find_server(), "-t", "-c", folder / "server.conf"]
    checked = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stderr
