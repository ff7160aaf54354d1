"""The arithmetic of the benchmarks of hubs."""

import pytest

from benchmarks import hub_figure, hub_load, nats_speed
from benchmarks.pairs import paired_ratio


def test_the_law_counts_messages_and_bytes():
    run = hub_load.run_of(2, None)
    boundary = hub_load.boundary_nbytes(run)
    assert boundary == 2 * 128 * 256 * 2 + 129 * 2  # bfloat16 both ways, and the ids
    messages, nbytes = hub_load.law(2, 16, boundary)
    assert (messages, nbytes) == (34, 16 * boundary + 34 * 64)
    assert hub_load.law(8, 16, boundary) == (7 * messages, 7 * nbytes)


def test_processor_time_is_shared_out_to_messages_and_bytes():
    def seen(messages, megabytes):
        seconds = 0.1 * messages / 1e3 + 0.003 * megabytes
        return {"per_step": {"in_msgs": messages, "in_bytes": megabytes * 1e6, "seconds": seconds}}

    results = [seen(34, 2.1), seen(34, 0.03), seen(238, 14.7), seen(238, 0.2)]
    assert hub_load.processor_law(results) == pytest.approx((0.1, 0.003))


def test_a_slower_transport_has_a_ratio_below_one():
    ratio, low, high = nats_speed.speed_ratio(paired_ratio([1.0] * 12, [2.0] * 6 + [1.0] * 6))
    assert (ratio, low, high) == (0.75, 0.5, 1.0)


def test_a_hub_carries_every_boundary():
    assert hub_figure.hub_mbps(3, 4096) == 2 * hub_figure.hub_mbps(2, 4096)
    assert hub_figure.hub_mbps(2, 40, tokens_per_second=1e6) == pytest.approx((2 * 40 * 2 + 3) * 8)
