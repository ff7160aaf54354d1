"""A folder that is not there: what stands beside it under nearly the same name."""

import pytest

from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import refuse_missing_run


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
