"""One process of a pipeline: runs every case and writes what it saw. Started by the contract test.

An audit hook counts unpickled classes: nothing that comes from a neighbour may be.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.pipeline.cases import CASES, run_case, segments_for


def main() -> None:
    schedule, output = sys.argv[1], Path(sys.argv[2])
    unpickled: list[str] = []
    sys.addaudithook(
        lambda event, arguments: unpickled.append(str(arguments)) if event == "pickle.find_class" else None
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    segments = segments_for(schedule, group.size())
    results = {case.name: run_case(case, segments, schedule, group) for case in CASES}
    output.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps({"results": results, "unpickled": unpickled}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
