"""Settings of a run that a hub refuses."""

from dataclasses import replace

import pytest

from tests.swarm.hub.test_training_host import host
from thinpipe.core.errors import UserError


def test_a_batch_that_no_message_can_hold_is_refused(run_config):
    config = replace(run_config, training=replace(run_config.training, global_batch_size=1 << 20, seq_len=16))
    with pytest.raises(UserError, match=r"token ids of a batch take 35651584 bytes.*lower training\.global_batch_size"):
        host(config)
