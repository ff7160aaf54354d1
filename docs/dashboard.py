"""Makes the screenshots of the dashboard anew: `python docs/dashboard.py`, with chromium on the PATH.

The run in them is an example: its events are written here, and nobody computed them. Of four machines one is lost and
comes back.
"""

import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from thinpipe.core.audit_events import LossRecomputed
from thinpipe.core.events import AnyEvent, EventLog, LinkTraffic, Saved, Started, Step, Validated
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted, PeerAssignment, PeerJoined, PeerLeft
from thinpipe.monitor.web_server import serving

DOCS = Path(__file__).parent
STEPS, SHOWN, LOST = 2000, 1520, 1310
TOKENS, SECONDS, BEGAN = 32_768, 11.6, 1_800_000_000.0
PEERS = {  # device, link in bits per second, round trip, share of a step in which it computes, memory
    "anna": ("NVIDIA GeForce RTX 4070", 80e6, 0.021, 0.58, 5.1e9),
    "bert": ("NVIDIA GeForce RTX 3060", 40e6, 0.034, 0.71, 4.4e9),
    "carla": ("Apple M2", 20e6, 0.018, 0.92, 6.0e9),
    "dora": ("NVIDIA GeForce RTX 3080", 90e6, 0.027, 0.63, 7.2e9),
}
PICTURES = {  # width, height, colours
    "dashboard": (1200, 1600, "light"),
    "dashboard_dark": (1200, 1600, "dark"),
    "dashboard_phone": (500, 2460, "light"),
}


def events() -> list[AnyEvent]:
    joined = (PeerJoined(peer=name, step=0, time_s=BEGAN + at) for at, name in enumerate((*PEERS, "emil")))
    config = f"[training]\nsteps = {STEPS}\n"
    found: list[AnyEvent] = [
        *joined,
        generation(1, 0, BEGAN + 30),
        Started(step=0, config=config, parameters=203_000_000, versions={}, dim=1024, time_s=BEGAN + 34),
    ]
    for number in range(1, SHOWN + 1):
        now = BEGAN + 40 + SECONDS * number + (95 if number > LOST else 0)
        found += [step(number, now), *after(number, now)]
    return found


def after(number: int, now: float) -> list[AnyEvent]:
    """Events between a step and the next."""
    found: list[AnyEvent] = []
    if number % 250 == 0:
        seen = loss_of(number) + 0.09
        found.append(Validated(step=number, loss=seen, bits_per_byte=seen / 2.9, tokens=1 << 20, seconds=4, time_s=now))
    if number % 120 == 0:
        path = f"runs/friends/checkpoints/step-{number:08d}"
        found.append(Saved(step=number, path=path, nbytes=2_440_000_000, seconds=6.2, time_s=now))
    if number % 360 == 0:
        loss = loss_of(number)
        found.append(
            LossRecomputed(
                step=number, reported=loss, recomputed=loss, band=1e-3, peers=["dora"], seconds=9, time_s=now + 1
            )
        )
    if number == LOST:
        why = "bert was lost (no heartbeat for 10 s)"
        found += [
            PeerLeft(peer="bert", step=1200, cause="no_heartbeat", reason=why, time_s=now + 10),
            GenerationEnded(generation=1, step=1200, cause="no_heartbeat", peer="bert", reason=why, time_s=now + 11),
            PeerJoined(peer="bert", step=1200, time_s=now + 48),
            generation(2, 1200, now + 52),
        ]
    return found


def generation(number: int, at: int, now: float) -> GenerationStarted:
    peers = [
        PeerAssignment(
            name=name,
            segments=[index],
            device=device,
            device_class=device,
            up_bps=link,
            down_bps=link,
            latency_s=latency,
        )
        for index, (name, (device, link, latency, _, _)) in enumerate(PEERS.items())
    ]
    return GenerationStarted(
        generation=number,
        step=at,
        peers=peers,
        bottleneck="the processor of carla (3.4 TFLOP/s)",
        planned_tokens_per_second=3400.0,
        who_reads="who can read the data: the hub's owner, and every machine that computes",
        time_s=now,
    )


def loss_of(number: int) -> float:
    noise = math.sin(12.9898 * number) * 43758.5453
    return 3.1 + 7.6 * number**-0.28 + 0.12 * (noise - math.floor(noise) - 0.5)


def step(number: int, now: float) -> Step:
    links = [
        LinkTraffic(boundary=boundary, forward=forward, nbytes=nbytes * TOKENS, waited_s=waited, mbps=mbps)
        for boundary, forward, nbytes, waited, mbps in (
            (0, True, 130, 1.1, 2.94),
            (0, False, 66, 0.6, 1.49),
            (1, True, 130, 2.9, 2.94),
            (1, False, 66, 1.2, 1.49),
            (2, True, 130, 0.8, 2.94),
            (2, False, 66, 0.9, 1.49),
        )
    ]
    return Step(
        step=number,
        loss=loss_of(number),
        grad_norm=0.8,
        lr=3e-4,
        tokens=number * TOKENS,
        seconds=SECONDS,
        tokens_per_second=TOKENS / SECONDS,
        links=links,
        busy=[busy for *_, busy, _ in PEERS.values()],
        memory=[int(nbytes) for *_, nbytes in PEERS.values()],
        time_s=now,
    )


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("there is no chromium here: install it and run this again", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "friends"
        run.mkdir()
        with EventLog(run / "events.jsonl") as log:
            for event in events():
                log.write(event)
        with serving(run) as address:
            for name, (width, height, colours) in PICTURES.items():
                picture = DOCS / f"{name}.png"
                command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
                command += [f"--user-data-dir={scratch}/browser", f"--window-size={width},{height}"]
                command += ["--virtual-time-budget=4000", f"--screenshot={picture}", f"{address}#{colours},still"]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
                print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
