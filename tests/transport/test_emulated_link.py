"""The arithmetic of a line, and its settings."""

import pytest

from thinpipe.config.link import LinkConfig
from thinpipe.core.errors import UserError
from thinpipe.transport.emulation.framing import wire_nbytes
from thinpipe.transport.emulation.link import EmulatedLink


def seconds(nbytes, megabits):
    return wire_nbytes(nbytes) * 8 / (megabits * 1e6)


def test_a_message_pays_for_gloos_notice_and_header_and_for_every_frame_begun():
    assert wire_nbytes(1400) == 114 + 1514
    assert wire_nbytes(1401) == 114 + 1514 + 67
    assert wire_nbytes(1_000_000) / 1_000_000 == pytest.approx(1514 / 1448, rel=1e-3)


def test_all_peers_share_the_uplink_in_the_order_of_sending():
    emulated_link = EmulatedLink(LinkConfig(up="8mbps", latency="30ms"), seed=0)
    first, second = emulated_link.send(10_000, 1, now=5.0), emulated_link.send(20_000, 2, now=5.0)
    assert first.departs == pytest.approx(5.0 + seconds(10_000, 8))
    assert second.departs == pytest.approx(first.departs + seconds(20_000, 8))
    assert second.arrives == pytest.approx(second.departs + 0.03)
    assert emulated_link.send(10_000, 1, now=50.0).departs == pytest.approx(50.0 + seconds(10_000, 8))


def test_a_downlink_costs_nothing_while_it_keeps_up_and_queues_when_it_does_not():
    same = EmulatedLink(LinkConfig(up="8mbps", down="8mbps"), seed=0)
    assert same.receive(10_000, 5.0) == pytest.approx(5.0)
    assert same.receive(10_000, 5.0) == pytest.approx(5.0 + seconds(10_000, 8))  # from another sender
    slower = EmulatedLink(LinkConfig(up="8mbps", down="2mbps"), seed=0)
    assert slower.receive(10_000, 5.0) == pytest.approx(5.0 - seconds(10_000, 8) + seconds(10_000, 2))
    alone = EmulatedLink(LinkConfig(down="2mbps"), seed=0)
    assert alone.receive(10_000, 5.0) == pytest.approx(5.0 + seconds(10_000, 2))


def test_jitter_is_seeded_bounded_and_never_lets_a_message_overtake():
    link = LinkConfig(latency="10ms", jitter="20ms")

    def arrivals(seed):
        emulated_link = EmulatedLink(link, seed=seed)
        return [emulated_link.send(100, 1, now=number * 0.001).arrives - number * 0.001 for number in range(200)]

    assert arrivals(1) == arrivals(1) != arrivals(2)
    delays = arrivals(1)
    assert 0.01 <= min(delays) < max(delays) <= 0.03
    moments = [delay + number * 0.001 for number, delay in enumerate(delays)]
    assert moments == sorted(moments)


def test_settings_say_what_to_write_and_whether_there_is_anything_to_do():
    assert not LinkConfig().is_shaped
    assert not LinkConfig(latency="0s").is_shaped
    assert all(LinkConfig(**{name: "1ms" if name in ("latency", "jitter") else "1mbps"}).is_shaped for name in FIELDS)
    with pytest.raises(UserError, match=r"link\.up: '80' is not a rate: write"):
        LinkConfig(up="80")
    with pytest.raises(UserError, match=r"link\.jitter: '1mbps' is not a duration: write"):
        LinkConfig(jitter="1mbps")


FIELDS = ("up", "down", "latency", "jitter")
