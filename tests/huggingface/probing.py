"""A process of a group that probes a model, as on a machine where nothing is known of it yet: prints what it found."""

import json
import sys
from datetime import timedelta

import torch.distributed as dist

from tests.huggingface.models import small_config
from thinpipe.config.link import LinkConfig
from thinpipe.models.hf.probe import probe
from thinpipe.transport.gloo_group import open_group


def main():
    open_group(LinkConfig(), timeout=timedelta(seconds=300))
    result = probe(small_config(sys.argv[1]))
    print(json.dumps([result.refusal, [check.name for check in result.checks if check.works]]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
