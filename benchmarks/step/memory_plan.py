"""Which memory readings `python -m benchmarks.step` needs, and where each of them goes in the result.

Two sets: the timed shapes (a fixed number of tokens per step), and a fixed batch size over the sequence lengths, which
shows what longer sequences cost.
"""

from collections.abc import Callable, Sequence

from benchmarks.step.config import StepConfig
from benchmarks.step.peak_memory import MemoryJob, MemoryReading, read_memory
from benchmarks.step.results import Growth
from benchmarks.step.variants import Variant, dense_variant


class StepMemory:
    """The readings by variant and shape; `measure` fills them in."""

    def __init__(self, config: StepConfig, variants: Sequence[Variant]) -> None:
        self.config, self.dense = config, dense_variant(config)
        everyone, same_shape = (self.dense, *variants), [variant for variant in variants if variant.match == "shape"]
        timed = [self._job(variant, config.tokens // seq, seq) for variant in everyone for seq in config.seqs]
        fixed = [
            self._job(variant, config.memory_batch, seq) for variant in (self.dense, *same_shape) for seq in config.seqs
        ]
        self.jobs = list(dict.fromkeys((*timed, *fixed)))  # what both sets ask for is measured once
        self.readings: dict[MemoryJob, MemoryReading] = {}

    def measure(self, advance: Callable[[], None]) -> None:
        """Runs one process after the other; `advance` is called after each."""
        for job in self.jobs:
            self.readings[job] = read_memory(job)
            advance()

    def at_timed_shape(self, variant: Variant, seq: int) -> MemoryReading:
        return self.readings[self._job(variant, self.config.tokens // seq, seq)]

    def growth(self, variant: Variant) -> Growth:
        seqs, batch = self.config.seqs, self.config.memory_batch
        dense = [self.readings[self._job(self.dense, batch, seq)] for seq in seqs]
        own = [self.readings[self._job(variant, batch, seq)] for seq in seqs]
        assert variant.width is not None
        return Growth(
            width=variant.width,
            batch=batch,
            seqs=seqs,
            dense_peaks_nbytes=tuple(reading.peak_nbytes for reading in dense),
            peaks_nbytes=tuple(reading.peak_nbytes for reading in own),
            dense_activations_nbytes=tuple(reading.activation_nbytes for reading in dense),
            activations_nbytes=tuple(reading.activation_nbytes for reading in own),
        )

    def _job(self, variant: Variant, batch: int, seq: int) -> MemoryJob:
        config = self.config
        return MemoryJob(
            variant=variant, batch=batch, seq=seq, device=config.device, bf16=config.bf16, threads=config.threads
        )
