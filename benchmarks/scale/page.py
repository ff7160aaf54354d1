"""The table: swarms by name, what they reach, what the hub carries, and what limits them."""

from dataclasses import replace

from benchmarks.scale.failures import Commits, kept_share
from benchmarks.scale.swarm import (
    AVERAGE,
    COMMITS,
    DEVICE,
    DOWN_BPS,
    LINK_SPREAD,
    LLAMA_8B,
    LLAMA_70B,
    MEMORY_NBYTES,
    SHARE_OF_PEAK,
    SPEED_SPREAD,
    TOKENS,
    UP_BPS,
    Swarm,
)
from thinpipe.planning.messages import message_sizes
from thinpipe.planning.simulation.links import pieces_of
from thinpipe.planning.simulation.simulate import Timeline

DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
EIGHT = Swarm("8B on 32, k = d/100", LLAMA_8B, 32, 40)
RENTED = replace(EIGHT, name="8B on 32, k = d/100, last stage rented", last_bps=1e9)
MANY = replace(RENTED, name="64 x 8B on 32, k = d/100, last stages rented", replicas=64)
SWARMS = (
    replace(EIGHT, name="8B on 32, dense", width=None),
    replace(EIGHT, name="8B on 32, k = d/8", width=512),
    EIGHT,
    replace(EIGHT, name="8B on 12, k = d/100", stages=12),
    RENTED,
    Swarm("70B on 80, k = d/100, last stage rented", LLAMA_70B, 80, 82, 256, extra=0, last_bps=1e9),
    MANY,
    replace(MANY, name="the same, hub of 40 Gbps", hub_bps=40e9),
)


def commits_of(swarm: Swarm) -> Commits:
    """With links in the middle of the field: the slowest part is the largest one on a home's link."""
    links = [swarm.link_of(stage, AVERAGE.link) for stage in range(swarm.stages)]
    seconds = [nbytes * 8 / (COMMITS * link.up_bps) for nbytes, link in zip(swarm.state_nbytes, links, strict=True)]
    through_hub = sum(swarm.state_nbytes) * 8 / (COMMITS * swarm.hub_bps / swarm.replicas)
    middle = sorted(swarm.state_nbytes)[swarm.stages // 2]
    return Commits(send_s=max(*seconds, through_hub), fetch_s=middle * 8 / DOWN_BPS)


def messages_per_step(swarm: Swarm) -> int:
    """Through the hub, in one direction; its exchange's too."""
    messages = message_sizes(swarm.cut, swarm.config)
    pieces = pieces_of(messages.forward_nbytes) + pieces_of(messages.backward_nbytes)
    return (swarm.stages - 1) * (swarm.microbatches * pieces + 2)


def limit_of(timeline: Timeline) -> str:
    """What is busy for the largest part of a step, when all peers are alike."""
    seconds = {
        "the last stage's processor": timeline.busy[-1],
        "the processors": max(timeline.busy[:-1]),
        "the homes' uplinks": max(busy for name, busy in timeline.link_busy.items() if name.startswith("up")),
        "the homes' downlinks": max(busy for name, busy in timeline.link_busy.items() if name.startswith("down")),
        "the hub's link": max(busy for name, busy in timeline.link_busy.items() if name.startswith("hub")),
    }
    name = max(seconds, key=lambda one: seconds[one])
    return f"{name}, {seconds[name] / timeline.seconds:.0%} busy"


def row(swarm: Swarm, draws: int) -> str:
    timeline, commits = swarm.alike(), commits_of(swarm)
    alike = swarm.replicas * swarm.microbatches * TOKENS / timeline.seconds
    drawn = swarm.drawn_tokens_per_second(draws)
    day, week = (kept_share(commits, peers=swarm.stages, lifetime_s=lifetime) for lifetime in (DAY_S, WEEK_S))
    gbps = swarm.replicas * timeline.link_nbytes["hub up"] * 8e-9 / timeline.seconds
    rate = swarm.replicas * messages_per_step(swarm) / timeline.seconds
    return (
        f"| {swarm.name} | {alike:,.0f} | {1 - timeline.bubble:.0%} | {limit_of(timeline)} | {drawn:,.0f} | "
        f"{commits.send_s / 60:,.0f} | {day:.0%} | {week:.0%} | {1e12 / (drawn * week) / DAY_S:,.0f} | "
        f"{gbps:.2f} | {rate:,.0f} |"
    )


def page(*, draws: int, name: str) -> str:
    memory = next(swarm for swarm in SWARMS if swarm.model is LLAMA_70B).memory_nbytes
    return _PAGE.format(
        head=" | ".join(_HEAD),
        rows="\n".join(row(swarm, draws) for swarm in SWARMS),
        name=name,
        draws=draws,
        device=DEVICE,
        peak=f"{SHARE_OF_PEAK:.0%}",
        up=f"{UP_BPS / 1e6:.0f}",
        down=f"{DOWN_BPS / 1e6:.0f}",
        speeds=SPEED_SPREAD,
        links=LINK_SPREAD,
        share=f"{COMMITS:.0%}",
        first=f"{memory[0] / 1e9:.1f}",
        last=f"{memory[-1] / 1e9:.1f}",
        memory=f"{MEMORY_NBYTES / 1e9:.0f}",
    )


_HEAD = (
    *("tokens/s, all alike", "peers compute", "limited by", "drawn", "min to send a commit"),
    *("kept, 1 day", "kept, 1 week", "days to 1T", "hub Gbps", "messages/s"),
)

_PAGE = """# Large swarms, by the clock of `thinpipe plan`

`python -m benchmarks.scale --output benchmarks/results --draws {draws}`

Computed, not run. Assumed:

- Peers have an {device}, of whose peak training gets {peak}, and home links of {up} Mbps up and {down} Mbps down, 20 ms
  from the hub, which has 10 Gbps up and down (the last row: 40). *Rented*: the last stage, with the head, has 1 Gbps.
- Llama in float32 with products in bfloat16; blocks are computed again in the backward pass; messages in bfloat16;
  micro-batches of 4,096 tokens, 128 a step (70B: 256); 1F1B; one block to a peer where 32 have the 8B model.
- *Drawn*: rates of processors and of links are log-normal (standard deviation of the logarithm {speeds} and {links});
  the fastest processor has the largest stage. The mean of {draws} pipelines.
- *Kept*: lives of peers end at random, after a day or a week in the mean. A standby goes on from the newest commit that
  is whole, after 3.1 s (measured: docs/concepts/fault-model.md) and the time to fetch its stage's state. Commits have
  {share} of what is sent to the hub, messages the rest, and begin as often as that allows.
- Days to 1T tokens: drawn, and kept with lives of a week. The hub's load is that of all alike, in each direction.

| | {head} |
|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|
{rows}

70B: the first stage needs {first} GB for its tensors and the last {last} GB, and the card has {memory}: both need a
larger one. Averaging of weights between replicas does not exist and is not counted; they share the hub equally.

![tokens per second over uplinks and over peers]({name}_speed.png)

![the share of work that is kept over the number of peers]({name}_failures.png)
"""
