"""A folder that is not there: what stands beside it under nearly the same name."""

import pytest

from thinpipe.checkpoint import find_checkpoint
from thinpipe.core.errors import UserError, first_cause
from thinpipe.core.run_folder import IDENTITY, refuse_missing_run


def test_the_nearest_name_is_said_wherever_the_path_goes_wrong(tmp_path):
    (tmp_path / "runs" / "quickstart" / "checkpoints").mkdir(parents=True)
    for missing, advice in (
        ("runs/quikstart", f"did you mean {tmp_path}/runs/quickstart?"),
        ("run/quickstart", f"did you mean {tmp_path}/runs/quickstart?"),
        ("runs/quikstart/checkpoints", f"did you mean {tmp_path}/runs/quickstart/checkpoints?"),
        ("runs/zebra", "name the dump_folder of a run"),
    ):
        with pytest.raises(UserError) as refused:
            refuse_missing_run(tmp_path / missing)
        assert str(refused.value) == f"there is no folder {tmp_path / missing}: {advice}"
    refuse_missing_run(tmp_path / "runs" / "quickstart")


def test_the_folder_of_a_peer_is_called_that(tmp_path):
    (tmp_path / IDENTITY).touch()
    with pytest.raises(UserError, match="has one machine's part of a run that it has joined: the whole model is at"):
        find_checkpoint(tmp_path)


def test_what_a_peer_waited_for_is_no_cause():
    lost, waited = ConnectionError("ada is lost"), ConnectionError("waited for micro-batch 4 of gradients")
    waited.__cause__ = lost
    assert first_cause(waited) is lost
