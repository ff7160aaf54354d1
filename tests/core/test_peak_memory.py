"""How much memory a process held is told wherever it runs, and never ends it."""

import sys

import pytest

from thinpipe.core import peak_memory as resident
from thinpipe.core.peak_memory import peak_resident_nbytes

MB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("status", [None, "VmRSS:\t 1 kB\n"])
@pytest.mark.parametrize("without", [None, "resource"])
def test_a_system_that_does_not_say_it(tmp_path, monkeypatch, status, without):
    monkeypatch.setattr(resident, "_STATUS", tmp_path / "status")
    if status is not None:
        (tmp_path / "status").write_text(status)
    if without is not None:
        monkeypatch.setitem(sys.modules, without, None)  # as if it were not installed
    assert 4 * MB < peak_resident_nbytes() < 1 << 44


def test_nothing_known_is_nothing(monkeypatch):
    def refused():
        raise PermissionError

    for name in ("_high_water_mark", "_resource_usage", "_now"):
        monkeypatch.setattr(resident, name, refused)
    assert peak_resident_nbytes() == 0
