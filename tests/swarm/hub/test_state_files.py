"""Files of a restarted hub: what is read back, and what is said of a damaged one."""

import pytest

from thinpipe.core.errors import UserError
from thinpipe.swarm.hub.state_files import GenerationFile, LinkFile


def test_numbers_and_rates_are_read_back(tmp_path):
    generation, link = GenerationFile(tmp_path / "generation"), LinkFile(tmp_path / "link.json")
    assert (generation.read(), link.read()) == (0, None)
    generation.write(7)
    link.write((1e6, 2e6))
    assert (generation.read(), link.read()) == (7, (1e6, 2e6))


@pytest.mark.parametrize("damage", [b"", b"\xff\xff", b"seven", b"-5", b"1e3", b"4294967296", b"7\n8", b"9" * 5000])
def test_a_damaged_file_is_no_traceback(tmp_path, damage):
    for name in ("generation", "link.json"):
        (tmp_path / name).write_bytes(damage)
    assert LinkFile(tmp_path / "link.json").read() is None, "rates are measured again"
    with pytest.raises(UserError, match=r"generation is damaged"):
        GenerationFile(tmp_path / "generation").read()


def test_rates_that_are_no_utf8_are_measured_again(tmp_path):
    (tmp_path / "link.json").write_bytes(b'["\xff", 1]')
    assert LinkFile(tmp_path / "link.json").read() is None
