"""Where a pipeline stops growing, and where it stops being worth it: two figures."""

from dataclasses import replace
from pathlib import Path

from benchmarks.scale.failures import Commits, kept_share
from benchmarks.scale.swarm import AVERAGE, COMMITS, DOWN_BPS, LLAMA_8B, MEMORY_NBYTES, UP_BPS, Peer, Swarm
from thinpipe.report.figures import COLOURS, pyplot

WIDTHS = {"dense": None, "k = d/8": 512, "k = d/100": 40}
UPLINKS_MBPS = (2, 5, 10, 20, 40, 80, 160, 400, 1000)
PEERS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
LIVES_HOURS = {"6 hours": 6, "a day": 24, "a week": 168, "a month": 720}
POOLS = (4, 8, 16, 32, 64, 128, 256, 512)


def speed(stages: int, width: int | None, peer: Peer = AVERAGE) -> float:
    swarm = Swarm("", LLAMA_8B, stages, width, microbatches=64)
    return swarm.tokens_per_second([peer] * stages)


def fits(stages: int, width: int | None) -> bool:
    return max(Swarm("", LLAMA_8B, stages, width, microbatches=64).memory_nbytes) <= MEMORY_NBYTES


def draw_speed(path: Path) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for colour, (name, width) in zip(COLOURS, WIDTHS.items(), strict=False):
        peers = [replace(AVERAGE, link=replace(AVERAGE.link, up_bps=mbps * 1e6)) for mbps in UPLINKS_MBPS]
        left.plot(UPLINKS_MBPS, [speed(32, width, peer) for peer in peers], color=colour, marker="o", ms=3, label=name)
        counts = [count for count in PEERS if fits(count, width)]
        right.plot(counts, [speed(count, width) for count in counts], color=colour, marker="o", ms=3, label=name)
    left.set(xscale="log", yscale="log", xlabel="uplink of every peer, Mbps", ylabel="tokens/s", title="8B on 32 peers")
    left.set_xticks(UPLINKS_MBPS, [f"{mbps}" for mbps in UPLINKS_MBPS], minor=False)
    left.minorticks_off()
    right.set(xlim=(0, 33), xlabel="peers", title=f"8B, uplinks of {UP_BPS / 1e6:.0f} Mbps, where it fits")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    left.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_failures(path: Path) -> None:
    """Each peer has a middle stage of 8B on 32."""
    state = Swarm("", LLAMA_8B, 32, 40).state_nbytes[16]
    commits = Commits(send_s=state * 8 / (COMMITS * UP_BPS), fetch_s=state * 8 / DOWN_BPS)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    for colour, (name, hours) in zip(COLOURS, LIVES_HOURS.items(), strict=False):
        shares = [100 * kept_share(commits, peers=count, lifetime_s=hours * 3600) for count in POOLS]
        axes.plot(POOLS, shares, color=colour, marker="o", ms=3, label=f"peers stay {name}")
    axes.set(
        xscale="log",
        xlabel="peers of one pipeline",
        ylabel="% of the time that is kept work",
        title=f"{state / 1e9:.1f} GB of state each: a commit takes {commits.send_s / 60:.0f} minutes to send",
        ylim=(0, 102),
    )
    axes.set_xticks(POOLS, [f"{count}" for count in POOLS], minor=False)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)
