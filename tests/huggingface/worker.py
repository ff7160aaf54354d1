"""One process of a pipeline over a Hugging Face model: trains a few steps in each format, and says what it has read."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.huggingface.runs import BOUNDARIES, LORA, train
from thinpipe.config.link import LinkConfig
from thinpipe.models.hf.weights import StoredTensors
from thinpipe.transport.gloo_group import open_group


def main() -> None:
    folder, cuts, schedule = Path(sys.argv[1]), tuple(map(int, json.loads(sys.argv[2]))), sys.argv[3]
    torch.set_num_threads(1)
    group = open_group(LinkConfig(), timeout=timedelta(seconds=300))
    read: set[str] = set()
    files: set[str] = set()
    whole_read = StoredTensors.read

    def reading(self: StoredTensors, name: str) -> torch.Tensor:
        read.add(name)
        tensor = whole_read(self, name)
        files.update(self._opened)
        return tensor

    with patch.object(StoredTensors, "read", reading):
        results = {name: train(folder, cuts, name, schedule=schedule, group=group) for name in BOUNDARIES}
    results["LoRA"] = train(folder, cuts, "rotated", lora=LORA, schedule=schedule, group=group)
    results["packed"] = train(folder, cuts, "rotated", schedule=schedule, group=group, packing=True)
    print(json.dumps({"results": results, "read": sorted(read), "files": sorted(files)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
