"""What counts as a full disk."""

import errno

import pytest

from thinpipe.core.disk_space import is_disk_full
from thinpipe.swarm.peer.request_pipeline import FileTransferError


def raised_for(cause):
    try:
        raise FileTransferError("a file cannot be written") from cause
    except FileTransferError as error:
        return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (raised_for(OSError(errno.ENOSPC, "No space left on device")), True),
        (raised_for(OSError(errno.EIO, "Input/output error")), False),
        (raised_for(None), False),
    ],
)
def test_only_a_full_disk_is_waited_for(error, expected):
    assert is_disk_full(error) is expected
