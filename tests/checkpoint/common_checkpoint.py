"""One process that agrees with others on a checkpoint and on the leader of its folder; prints the outcomes as JSON.

Arguments: folder of all processes. Started by test_distributed.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from thinpipe.checkpoint import CheckpointFolder
from thinpipe.checkpoint.distributed import is_leader, latest_common_checkpoint
from thinpipe.config.link import LinkConfig
from thinpipe.core.errors import OtherProcessError, UserError
from thinpipe.transport.collectives import StarCollectives
from thinpipe.transport.gloo_group import open_group


def main():
    collectives = StarCollectives(open_group(LinkConfig(), timeout=timedelta(seconds=300)))
    folder = Path(sys.argv[1]) / str(collectives.rank)

    def outcome(action):
        try:
            return action()
        except (UserError, OtherProcessError) as error:
            cause = error.__cause__
            return {
                "kind": type(error).__name__,
                "text": str(error),
                "errno": cause.errno if isinstance(cause, OSError) else None,
            }

    def agreed_step():
        checkpoint, problems = latest_common_checkpoint(
            CheckpointFolder(folder / "checkpoints"), ["first", "last"], collectives
        )
        return [None if checkpoint is None else checkpoint.manifest.step, problems]

    outcomes = [outcome(agreed_step), outcome(lambda: is_leader(folder, collectives))]
    dist.destroy_process_group()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
