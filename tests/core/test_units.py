"""Rates and durations as people write them."""

import pytest

from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bit_rate, format_duration, format_flops, parse_duration, parse_rate


@pytest.mark.parametrize(
    ("text", "bits_per_second"), [("80mbps", 80e6), ("1gbps", 1e9), ("500kbps", 500e3), ("2.5mbps", 2.5e6)]
)
def test_rates_are_read_in_any_case(text, bits_per_second):
    assert parse_rate(text) == parse_rate(text.upper()) == bits_per_second


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("1.5s", 1.5), ("0ms", 0.0), ("0.25ms", 0.00025)])
def test_durations_are_read_in_any_case(text, seconds):
    assert parse_duration(text) == parse_duration(text.upper()) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "80", "80 mbps", "mbps", "-1mbps", "1e3mbps", "80mb/s", "80mbit", "20ms", "0mbps"]
)
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(UserError, match="write bits per second, such as 500kbps, 80mbps or 1gbps"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["", "20", "20 ms", "-1ms", "nanms", "infs", "1min", "80mbps", "٣ms"])
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(UserError, match=r"write milliseconds or seconds, such as 20ms or 0\.5s"):
        parse_duration(text)


def test_figures_for_people():
    assert [format_bit_rate(rate) for rate in (500, 2e4, 2e7, 1.25e9)] == [
        "0.5 kbps",
        "20 kbps",
        "20 Mbps",
        "1.25 Gbps",
    ]
    assert [format_duration(seconds) for seconds in (0.04, 9.96, 42.4, 119.9, 120, 7199, 9000)] == [
        "0.0 s",
        "10.0 s",
        "42 s",
        "120 s",
        "2.0 min",
        "120.0 min",
        "2.5 h",
    ]
    assert [format_flops(flops) for flops in (5.4e10, 1.2e12)] == ["54 GFLOP/s", "1.2 TFLOP/s"]
