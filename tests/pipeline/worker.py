"""One process of a pipeline: runs every case, or a few, and writes what it saw. Started by the contract test.

An audit hook counts unpickled classes: nothing that comes from a neighbour may be.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.pipeline.cases import cases_for, run_case, segments_for
from tests.pipeline.counting import open_counting_group, open_counting_nats_group


def main() -> None:
    schedule, output, few = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "few"
    unpickled: list[str] = []
    sys.addaudithook(
        lambda event, arguments: unpickled.append(str(arguments)) if event == "pickle.find_class" else None
    )
    torch.set_num_threads(1)
    group = open_counting_nats_group(600) if "BROKER" in os.environ else open_counting_group(600)
    segments = segments_for(schedule, group.size())
    results = {}
    for case in cases_for(schedule, few=few):
        group.messages.clear()
        results[case.name] = run_case(case, segments, schedule, group)
        results[case.name]["sent"] = [[tag, nbytes, count] for (tag, nbytes), count in group.messages.items()]
    output.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps({"results": results, "unpickled": unpickled}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
