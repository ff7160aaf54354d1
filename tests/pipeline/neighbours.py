"""Two neighbours, of which the first is hostile: it asks for dynamic shapes and offers pickled code as metadata."""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining._utils import InferenceMode

from tests.pipeline.cases import CASES, config_of
from thinpipe.boundary.contract import MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.models import build, materialise
from thinpipe.pipeline.message_stage import MessageStage
from thinpipe.pipeline.stage_module import StageModule


class Payload:
    """Unpickling it writes the file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.target)!r}, 'w').write('ran')",)


class HostileSchedule(ScheduleGPipe):
    def _dynamic_shapes(self, stages: Sequence[Any], *_args: Any) -> None:
        """In place of the agreement of torch's stages on dynamic or static shapes."""
        for stage in stages:
            stage._inference_mode = InferenceMode.DYNAMIC

    _warmup_p2p = _dynamic_shapes  # up to torch 2.14
    _initialize_pipeline_distributed_state = _dynamic_shapes  # from torch 2.15


class HostileStage(PipelineStage):
    def _send_meta(self, meta: Any, dst_stage: int) -> None:  # noqa: ARG002
        dist.send_object_list([Payload(Path(sys.argv[1]))], dst=dst_stage)


def main() -> None:
    hostile = os.environ["RANK"] == "0"
    dist.init_process_group("gloo", timeout=timedelta(seconds=5 if hostile else 300))
    device = torch.device("cpu")
    if hostile:  # ends when nobody has taken the offer in time
        stage: PipelineStage = HostileStage(nn.Linear(4, 4), 0, 2, device)
        HostileSchedule(stage, 2).step(torch.zeros(2, 4))
        return
    config = config_of(CASES[0], 2, "GPipe").model.resolve(64)
    shape = MessageShape(batch=1, tokens=12, width=32, vocab_size=64, dtype=torch.float32)
    method = make_method(config_of(CASES[0], 2, "GPipe").boundary, shape, in_subspace=False, seed=0)
    segments = build(config).segments
    materialise(segments[1], seed=0)
    stage = MessageStage(StageModule(segments, range(1, 2), [method], seed=0), 1, 2, device=device)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda loss, _nothing: loss)
    stage.connect()
    stage.begin(0, 2, backward=True)
    schedule.step(target=torch.zeros(2), losses=[])


if __name__ == "__main__":
    main()
