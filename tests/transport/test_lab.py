"""The shaper against the kernel: token buckets and held frames between network namespaces. Needs root and `tc`."""

import json
import math
import subprocess
import sys

import pytest

from benchmarks.netns import lab
from tests.transport.processes import group_environment, results, start
from thinpipe.transport.emulation.framing import wire_nbytes

_MISSING = lab.missing()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

FRAME_NBYTES, SEGMENT_NBYTES, NOTICE_NBYTES, ACKNOWLEDGEMENT_NBYTES = 1514, 1448, 114, 66


def in_lab(jobs, **line):
    """What two machines with this line saw; gloo finds its own way between them."""
    with lab.KernelTestbed(2, **line) as machines:
        workers = [
            machines.popen(
                index,
                [sys.executable, "-m", "tests.transport.stream", json.dumps([{"link": {}, **job} for job in jobs])],
                group_environment(index, 2, machines.address(0), 29500),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for index in range(2)
        ]
        return results(workers)


def fastest(seen):
    """Seconds from the first message to the last, of the best take of each job; the first take warms TCP up."""
    return [
        min(max(part["ended"] for part in take) - min(part["began"] for part in take) for take in [*takes][1:])
        for takes in (zip(*parts, strict=True) for parts in zip(*seen, strict=True))
    ]


@pytest.mark.quiet
def test_bytes_on_the_wire_are_those_that_the_shaper_counts():
    sizes = {1_000: 200, 10_000: 100, 100_000: 30, 1_000_000: 6}
    jobs = [{"nbytes": n, "count": count, "ahead": 16, "one_way": True, "takes": 2} for n, count in sizes.items()]
    _, receiver = in_lab(jobs, up="80mbps", down="80mbps")
    for (nbytes, count), takes in zip(sizes.items(), receiver, strict=True):
        there = min(take["received_nbytes"] for take in takes) / count
        back = min(take["sent_nbytes"] for take in takes) / count
        counted = wire_nbytes(nbytes)
        print(
            f"\n{nbytes:>9} bytes: {there / nbytes - 1:7.2%} more on the wire (counted: {counted / nbytes - 1:7.2%}), "
            f"{back / nbytes:7.2%} the other way",
            end="",
        )
        # Small writes that find a queue share frames, so a message may cost less than it does alone.
        assert (nbytes + 96) * FRAME_NBYTES / SEGMENT_NBYTES * 0.99 < there < counted * 1.02
        assert 48 < back < NOTICE_NBYTES + ACKNOWLEDGEMENT_NBYTES * math.ceil(counted / FRAME_NBYTES + 1)


LINES = {
    ("80mbps", "0ms"): 100,
    ("80mbps", "20ms"): 100,
    ("20mbps", "0ms"): 30,
    ("20mbps", "20ms"): 30,
}


@pytest.fixture(scope="module")
def shaped():
    """Seconds on the shaped loopback, by line."""
    jobs = [
        {"link": {"up": rate, "down": rate, "latency": latency}, **stream(count)}
        for (rate, latency), count in LINES.items()
    ]
    return dict(zip(LINES, fastest(results(start(2, "tests.transport.stream", json.dumps(jobs)))), strict=True))


def stream(count):
    """Both ways at once. All receives are posted: gloo's notices would else queue behind the data of the other way."""
    return {"nbytes": 30_000, "count": count, "ahead": count, "one_way": False, "takes": 4}


@pytest.mark.quiet
@pytest.mark.parametrize(("rate", "latency"), LINES)
def test_a_shaped_line_takes_the_time_of_a_real_one(rate, latency, shaped):
    (real,) = fastest(in_lab([stream(LINES[rate, latency])], up=rate, down=rate, latency=latency))
    seconds = shaped[rate, latency]
    print(
        f"\n{rate}, {latency} one way: kernel {real:.3f} s, shaped {seconds:.3f} s, {seconds / real - 1:+.1%}", end=""
    )
    assert seconds == pytest.approx(real, rel=0.2)  # benchmarks/link_emulation.py says how near, on a quiet machine


def test_a_lab_leaves_nothing_behind():
    started = []

    def fail_in_a_lab():
        with lab.KernelTestbed(2, up="1mbps", latency="1ms") as machines:
            started.append((machines, machines.popen(1, ["sleep", "60"])))
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_a_lab()
    ((machines, process),) = started
    assert process.poll() is not None
    assert machines.name not in lab.run("ip", "netns", "list")
