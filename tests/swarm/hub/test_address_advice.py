"""What a hub says of an address before anybody has tried it."""

import pytest

from thinpipe.swarm.hub.address_advice import who_can_reach


@pytest.mark.parametrize(
    ("address", "host", "said"),
    [
        ("192.168.1.5", "0.0.0.0", "192.168.1.5 is an address of a local network"),
        ("fd00::1", "::", "fd00::1 is an address of a local network"),
        ("100.64.0.1", "0.0.0.0", "100.64.0.1 is an address of a local network"),
        ("127.0.0.1", "0.0.0.0", "invites name 127.0.0.1"),
        ("localhost", "0.0.0.0", "invites name localhost"),
        ("198.51.100.7", "127.0.0.1", "the hub listens on 127.0.0.1: only programs on this machine"),
        ("8.8.8.8", "0.0.0.0", None),
        ("anna.example.net", "0.0.0.0", None),
    ],
)
def test_who_can_reach_it(address, host, said):
    lines = who_can_reach(address, host, 4222, is_chosen=True)
    assert len(lines) == (said is not None)
    assert said is None or lines[0].startswith(said)


def test_a_port_that_nobody_has_chosen_is_said():
    (line,) = who_can_reach("8.8.8.8", "0.0.0.0", 45103, is_chosen=False)
    assert "port 45103" in line
    assert "--hub.port" in line
