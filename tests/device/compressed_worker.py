"""One process of a pipeline of `CompressedStage`s on `sim`: every schedule, each with another boundary. Started by
`test_compressed_stage.py`, and writes what it computed."""

import json
import os
import sys
from itertools import cycle
from pathlib import Path

import torch.distributed as dist

from tests.pipeline.compressed_worker import BOUNDARIES, SCHEDULES, run_here
from tests.pipeline.counting import open_counting_group

CASES = [*zip(SCHEDULES, cycle(BOUNDARIES), strict=False)]
"""(schedule, boundary)"""


def main():
    group = open_counting_group(600)
    results = {
        f"{schedule} {boundary}": run_here(schedule, BOUNDARIES[boundary], group, device="sim")
        for schedule, boundary in CASES
    }
    Path(sys.argv[1]).with_suffix(f".{os.environ['RANK']}").write_text(json.dumps({"results": results}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
