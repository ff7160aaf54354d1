"""What the clock of `thinpipe plan` says of runs that others have published: python -m benchmarks.plan_papers.

ProtocolNanoGPT publishes all that a step depends on, so it is predicted. arXiv 2506.01260 does not, so what is missing
is fitted to one of its two figures, and the other is compared under several assumptions. No torch, nothing is trained.
"""

from argparse import ArgumentParser
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from thinpipe.core.files import write_atomically
from thinpipe.planning.simulation.links import LinkSpec
from thinpipe.planning.simulation.schedule_actions import action_lists
from thinpipe.planning.simulation.simulate import StageTimes, StepSpec, simulate

STAGES, BATCH_TOKENS = 8, 524_288
LINK = LinkSpec(up_bps=200e6, latency_s=0.05, latency_per="message")
"""One queue for states and gradients of a stage, occupied during the latency of each message."""


@dataclass(frozen=True)
class Entry:
    """Of ProtocolNanoGPT."""

    name: str
    nbytes_per_token: int
    microbatches: int
    compute_s: float
    """A step with the links off."""
    published_s: float

    @property
    def predicted_s(self) -> float:
        tokens = BATCH_TOKENS // self.microbatches
        each = self.compute_s / (self.microbatches + STAGES - 1)
        return step_seconds(
            *("1F1B", STAGES, self.microbatches, each, LINK),
            (tokens * self.nbytes_per_token, tokens * self.nbytes_per_token),
        )


ENTRIES = (Entry("dense bf16", 2048, 64, 0.54, 100.475), Entry("subspace, k = 160", 322, 32, 0.66, 19.889))

TOKENS, WIDTH, DIM, PARAMETERS = 32 * 1024, 40, 4096, 2e9
THIN, DENSE = 592.41, 36.12
"""Published tokens per second at 80 Mbps."""


@dataclass(frozen=True)
class Assumption:
    """What arXiv 2506.01260 leaves open."""

    stages: int
    itemsize: int
    microbatches: int

    def tokens_per_second(self, width: int, pass_s: float) -> float:
        """If forward and backward pass of a stage take so long for the whole batch."""
        tokens = TOKENS // self.microbatches
        ids = 0 if width == DIM else self.itemsize
        nbytes = (tokens * (width * self.itemsize + ids), tokens * width * self.itemsize)
        link = LinkSpec(up_bps=80e6, down_bps=80e6)
        seconds = step_seconds("GPipe", self.stages, self.microbatches, pass_s / self.microbatches, link, nbytes)
        return TOKENS / seconds

    @property
    def fitted_pass_s(self) -> float:
        """With which the subspace model has the published rate."""
        low, high = 0.0, TOKENS / THIN
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self.tokens_per_second(WIDTH, middle) > THIN else (low, middle)
        return low

    @property
    def row(self) -> str:
        pass_s = self.fitted_pass_s
        dense = self.tokens_per_second(DIM, pass_s)
        teraflops = 6 * PARAMETERS / self.stages * TOKENS / pass_s / 1e12
        number = "bf16" if self.itemsize == 2 else "fp32"
        return (
            f"| {self.microbatches} | {number} | {self.stages} | {pass_s:.2f} | {teraflops:.1f} | {dense:.1f} | "
            f"{dense / DENSE:.2f} | {THIN / dense:.1f} |"
        )


ASSUMPTIONS = tuple(
    Assumption(stages, itemsize, microbatches)
    for microbatches in (1, 8, 32)
    for itemsize in (2, 4)
    for stages in (8, 9)
)


def step_seconds(
    schedule: str, stages: int, microbatches: int, pass_s: float, link: LinkSpec, nbytes: tuple[int, int]
) -> float:
    """With equal stages, whose forward pass takes a third of a micro-batch's time."""
    third = StageTimes(forward_s=pass_s / 3, input_s=pass_s / 3, weight_s=pass_s / 3)
    step_spec = StepSpec(
        actions=action_lists(schedule, stages, microbatches),
        stage_times=[third] * stages,
        links=[link] * stages,
        forward_nbytes=nbytes[0],
        backward_nbytes=nbytes[1],
        framing="none",
    )
    return simulate(step_spec, record=False).seconds


def page() -> str:
    known = [
        f"| {entry.name} | {entry.nbytes_per_token} | {entry.microbatches} | {entry.compute_s} | "
        f"{entry.published_s:.1f} | {entry.predicted_s:.1f} | {entry.predicted_s / entry.published_s - 1:+.1%} |"
        for entry in ENTRIES
    ]
    fitted = [assumption.row for assumption in ASSUMPTIONS]
    return _PAGE.format(known="\n".join(known), fitted="\n".join(fitted), thin=THIN, dense=DENSE, ratio=THIN / DENSE)


_PAGE = """# Published step times, by the clock of `thinpipe plan`

`python -m benchmarks.plan_papers --output benchmarks/results`

Computed by `planning/simulation/simulate.py` alone; nothing was trained, and no figure depends on the machine.

## ProtocolNanoGPT

https://github.com/PluralisResearch/ProtocolNanoGPT publishes code and logs: 8 stages of one layer, 524,288 tokens a
step, torch's 1F1B, 64 micro-batches dense and 32 with the subspace, 200 Mb/s and 50 ms. All that reaches a stage,
states and gradients, waits on one clock, which stands still for the latency of each message
(`SimPipelineStage.add_delay`).

Assumed: stages are equal, and backward passes take twice as long as forward ones, so that a step with the links off
takes its logged time; the optimiser is in that time; no framing. Their clock is the receiver's and serves messages in
the order in which they are read, ours is the sender's and serves them in the order in which they are sent: the same
messages on the same clocks, but for which end waits.

| entry | B/token and direction | micro-batches | links off, s | published s/step | predicted | error |
|---|---:|---:|---:|---:|---:|---:|
{known}

## arXiv 2506.01260

The paper's headline is {thin} tokens/s with k = 40 at 80 Mbps against {dense} uncompressed, {ratio:.1f} times as
much: a Llama of 2B parameters, 8 layers, d = 4096, context 1024, batch 32, GPipe. We have not found published: the
number of stages, micro-batches, the number format of messages, latency, and how long a stage computes. So the passes
of a stage are fitted to {thin}, dense is given the same passes, and what comes out is beside {dense}. Assumed: no
latency, no framing, equal stages, every machine 80 Mbps up and as much down, one more number per token for the id
where messages are thin.

| micro-batches | format | stages | fitted: s/step of a stage | its TFLOP/s | dense tokens/s | of the published | gain |
|---:|---|---:|---:|---:|---:|---:|---:|
{fitted}

One micro-batch: nothing overlaps, every byte of every boundary is waited for. So with float32, and a boundary for
each of the 8 layers (9 stages: the head apart), dense comes out as published, and stages compute at a rate that GPUs
have (6 operations per parameter and token). With more micro-batches transfers overlap each other and the passes:
dense is then several times as fast as published, and the fit asks for implausibly slow stages. Both figures fit a
pipeline in which nothing overlaps; that it was one is our inference, not the paper's word. Where transfers overlap,
thin messages gain less.
"""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="the folder in which to write the page")
    output = parser.parse_args().output
    text = page()
    print(text)
    if output is not None:
        write_atomically(output / f"plan_papers_{date.today()}.md", text.encode())


if __name__ == "__main__":
    main()
