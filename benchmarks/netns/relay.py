"""Holds every Ethernet frame for a while: what `tc netem delay` does, on kernels without it.

    python relay.py SECONDS TAP...

Makes the tap devices in its network namespace. A frame that comes out of one goes into the one that the last byte of
its destination address counts to. Ends with its standard input. One thread; it wakes up at most once a tick and then
moves all that is due, so that it leaves the processors to those who are measured.
"""

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_NBYTES = 2048
TICK_S = 0.0005


def open_tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def move_frames(taps: list[int], seconds: float, stop: int) -> int:
    """Until `stop` can be read. Frames that do not fit are dropped, as on a real link. Returns how many came."""
    held: deque[tuple[float, int, bytes]] = deque()
    count = 0
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable, _, _ = select.select([*taps, stop], [], [], wait)
        if stop in readable:
            return count
        due = time.monotonic() + seconds
        for tap in readable:
            if tap == stop:
                continue
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(tap, FRAME_NBYTES)
                    # Not multicast: one that came back to its sender's bridge would teach it a wrong way to the sender.
                    if not frame[0] & 1 and frame[5] < len(taps):
                        held.append((due, taps[frame[5]], frame))
                    count += 1
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, tap, frame = held.popleft()
            with contextlib.suppress(BlockingIOError):
                os.write(tap, frame)
        time.sleep(TICK_S)


def main() -> None:
    # A frame waits half a tick on average before it is read, and as long again before it is written.
    seconds = max(0.0, float(sys.argv[1]) - TICK_S)
    taps = [open_tap(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    began = time.process_time()
    count = move_frames(taps, seconds, sys.stdin.fileno())
    print(f"{count} frames, {time.process_time() - began:.3f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
