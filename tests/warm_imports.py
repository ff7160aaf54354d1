"""What the fork server of `tests.warm` imports before its first fork, and the proof that this has started no thread."""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch reads them

import torch._dynamo
import torch.distributed.pipelining  # noqa: F401

import tests.warm  # noqa: F401
import thinpipe.cli
import thinpipe.pipeline.pipeline_runner
import thinpipe.swarm.hub.command
import thinpipe.swarm.peer.join
import thinpipe.training.process  # noqa: F401

THREADS = len(os.listdir("/proc/self/task"))
