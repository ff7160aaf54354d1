"""Rates and durations as people write them."""

import pytest

from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bit_rate, format_duration, format_flops, format_rate, parse_duration, parse_rate


@pytest.mark.parametrize(
    ("text", "bits_per_second"), [("80mbps", 80e6), ("1gbps", 1e9), ("500kbps", 500e3), ("2.5mbps", 2.5e6)]
)
def test_rates_are_read_in_any_case_and_written_back(text, bits_per_second):
    assert parse_rate(text) == parse_rate(text.upper()) == bits_per_second
    assert format_rate(bits_per_second) == text


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("1.5s", 1.5), ("0ms", 0.0), ("0.25ms", 0.00025)])
def test_durations_are_read_in_any_case_and_written_back(text, seconds):
    assert parse_duration(text) == parse_duration(text.upper()) == pytest.approx(seconds, rel=1e-12)
    assert format_duration(seconds) == text


def test_a_value_goes_into_the_largest_unit_that_fits():
    assert [format_rate(rate) for rate in (100.0, 999e3, 1e6, 12e9)] == ["0.1kbps", "999kbps", "1mbps", "12gbps"]
    assert [format_duration(duration) for duration in (0.0005, 0.999, 1, 90)] == ["0.5ms", "999ms", "1s", "90s"]


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
    assert [format_flops(flops) for flops in (5.4e10, 1.2e12)] == ["54 GFLOP/s", "1.2 TFLOP/s"]
