"""Pipelines of home machines around a hub: how fast they are, alike and with machines and links drawn at random."""

import random
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean
from typing import cast

from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.families import PRESETS
from thinpipe.config.families.llama import LlamaConfig
from thinpipe.config.model import ExecutionConfig, SubspaceConfig
from thinpipe.config.run import CheckpointConfig, ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.planning.devices import DEVICES
from thinpipe.planning.messages import message_sizes
from thinpipe.planning.segment_cost import SegmentCost
from thinpipe.planning.segment_costs import segment_costs, segment_needs
from thinpipe.planning.simulation.links import LinkSpec
from thinpipe.planning.simulation.schedule_actions import action_lists
from thinpipe.planning.simulation.simulate import StageTimes, StepSpec, Timeline, simulate

DEVICE = "RTX 4090"
PEAK_FLOPS, MEMORY_NBYTES = DEVICES[DEVICE].peak_flops("bf16"), 1e9 * (DEVICES[DEVICE].memory_gb or 0)
"""Dense bfloat16 with float32 sums (NVIDIA Ada GPU Architecture, whitepaper, 2022)."""
SHARE_OF_PEAK = 0.4
"""What training reaches of it; an assumption, no such card was measured."""
UP_BPS, DOWN_BPS, LATENCY_S = 40e6, 200e6, 0.02
"""The link of a home in the middle of the field; a round trip to the hub takes 40 ms."""
SPEED_SPREAD, LINK_SPREAD = 0.25, 0.5
"""Standard deviations of the logarithms of processors' and links' rates."""
COMMITS = CheckpointConfig().uplink_share
"""Of everybody's link to the hub, and of the hub's."""
TOKENS = 4096
"""Of a sequence, which is a micro-batch."""

LLAMA_8B = cast(LlamaConfig, PRESETS["llama-8b"])
LLAMA_70B = replace(LLAMA_8B, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28_672)


@dataclass(frozen=True)
class Peer:
    flops: float
    link: LinkSpec


AVERAGE = Peer(PEAK_FLOPS * SHARE_OF_PEAK, LinkSpec(up_bps=UP_BPS, down_bps=DOWN_BPS, latency_s=LATENCY_S))


def drawn(peer: Peer, draw: random.Random) -> Peer:
    """One of the field of which `peer` is in the middle."""
    speed, rate = draw.lognormvariate(0, SPEED_SPREAD), draw.lognormvariate(0, LINK_SPREAD)
    link = replace(peer.link, up_bps=peer.link.up_bps * rate, down_bps=peer.link.down_bps * rate)
    return Peer(peer.flops * speed, link)


@dataclass(frozen=True)
class Swarm:
    """Replicas of one pipeline each, which share a hub equally and nothing else. Commits are sent meanwhile, and take
    their share of all that is sent to the hub."""

    name: str
    model: LlamaConfig
    stages: int
    width: int | None
    """None: dense."""
    microbatches: int = 128
    replicas: int = 1
    extra: int = 1
    """Micro-batches in flight beside those that 1F1B has by itself."""
    hub_bps: float = 10e9
    last_bps: float | None = None
    """The link of the last stage, both directions, if it is no home's."""

    @cached_property
    def config(self) -> RunConfig:
        return RunConfig(
            training=TrainingConfig(seq_len=TOKENS, global_batch_size=self.microbatches, precision="bf16-mixed"),
            parallelism=ParallelismConfig(
                pipeline_parallel_degree=self.stages,
                pipeline_parallel_microbatch_size=1,
                pipeline_parallel_extra_microbatches=self.extra,
            ),
            boundary=BoundaryConfig(forward="bf16", backward="bf16"),
            execution=ExecutionConfig(checkpoint_activations="block"),
        )

    @cached_property
    def cut(self) -> LlamaConfig:
        """One block beside the head, the others shared equally."""
        blocks, others = self.model.n_layers - 1, self.stages - 1
        cuts = tuple(round(stage * blocks / others) for stage in range(1, self.stages))
        return replace(self.model, boundaries=cuts, subspace=SubspaceConfig(width=self.width))

    @cached_property
    def costs(self) -> list[SegmentCost]:
        return segment_costs(self.cut, self.config)

    @property
    def state_nbytes(self) -> list[int]:
        """Of each stage: what a commit holds."""
        return [cost.state_nbytes for cost in self.costs]

    @property
    def memory_nbytes(self) -> list[int]:
        return [need.memory_nbytes for need in segment_needs(self.costs, self.config)]

    def step(self, peers: list[Peer]) -> Timeline:
        """The fastest processor has the largest stage."""
        sizes = [cost.flops_per_token for cost in self.costs]
        by_size = sorted(range(self.stages), key=lambda stage: -sizes[stage])
        place = dict(zip(by_size, sorted(peers, key=lambda peer: -peer.flops), strict=True))
        messages = message_sizes(self.cut, self.config)
        links = [self.link_of(stage, place[stage].link) for stage in range(self.stages)]
        part = self.hub_bps / self.replicas
        step_spec = StepSpec(
            actions=action_lists("1F1B", self.stages, self.microbatches, extra=self.extra),
            stage_times=[_work(cost, place[stage].flops) for stage, cost in enumerate(self.costs)],
            links=[replace(link, up_bps=link.up_bps * (1 - COMMITS)) for link in links],
            hub=LinkSpec(up_bps=part, down_bps=part * (1 - COMMITS)),
            forward_nbytes=messages.forward_nbytes,
            backward_nbytes=messages.backward_nbytes,
            allreduce_nbytes=8 * 10 * self.model.n_layers,
        )
        return simulate(step_spec, record=False)

    def link_of(self, stage: int, home: LinkSpec) -> LinkSpec:
        if self.last_bps is None or stage < self.stages - 1:
            return home
        return replace(home, up_bps=self.last_bps, down_bps=self.last_bps)

    def tokens_per_second(self, peers: list[Peer]) -> float:
        """Of all replicas, if all were like this one."""
        return self.replicas * self.microbatches * TOKENS / self.step(peers).seconds

    def alike(self, peer: Peer = AVERAGE) -> Timeline:
        return self.step([peer] * self.stages)

    def drawn_tokens_per_second(self, draws: int, *, seed: int = 0) -> float:
        """The mean over pipelines of peers drawn at random."""
        draw = random.Random(seed)
        return mean(self.tokens_per_second([drawn(AVERAGE, draw) for _ in range(self.stages)]) for _ in range(draws))


def _work(cost: SegmentCost, flops: float) -> StageTimes:
    backward = cost.backward_flops_per_token * TOKENS / flops
    return StageTimes(
        forward_s=cost.forward_flops_per_token * TOKENS / flops, input_s=backward / 2, weight_s=backward / 2
    )
