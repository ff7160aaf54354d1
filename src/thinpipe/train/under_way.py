"""How many micro-batches a segment holds at once. No torch here: plans ask too."""

from thinpipe.train.config import RunConfig


def under_way(index: int, count: int, processes: int, config: RunConfig) -> int:
    """Of segment `index` of `count`, shared by `processes`: forward passes before the first backward one, and at most
    all."""
    if processes == 1:
        return 1
    if config.parallelism.pipeline_parallel_schedule != "1F1B":
        return config.microbatches  # right for GPipe; the others hold no more
    after = min(processes - 1, count - 1 - index)
    extra = config.parallelism.pipeline_parallel_extra_microbatches
    return min(config.microbatches, 1 + after * (1 + extra))
