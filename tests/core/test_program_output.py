"""The log file of a hub or a peer: what is in it, how large it becomes, and a disk that is full."""

import logging

from thinpipe.core import program_output
from thinpipe.core.program_output import log_to_file

LOG = logging.getLogger("thinpipe.swarm.some_module")


def test_messages_of_modules_are_in_the_file_while_it_is_open(tmp_path):
    path = tmp_path / "hub.log"
    with log_to_file(path):
        LOG.info("request of %s dropped", "anna")
        LOG.debug("too much detail")
    LOG.warning("after the end")
    (line,) = path.read_text().splitlines()
    assert line.endswith("INFO thinpipe.swarm.some_module: request of anna dropped")


def test_the_file_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(program_output, "_MAX_LOG_NBYTES", 1000)
    with log_to_file(tmp_path / "hub.log"):
        for _ in range(100):
            LOG.warning("x" * 100)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_cannot_be_written_disturbs_nobody(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        logging.getLogger("thinpipe"), "handlers", []
    )  # commands of other tests show warnings on stderr
    (tmp_path / "hub.log").mkdir()
    with log_to_file(tmp_path / "hub.log"):
        LOG.warning("lost")
    assert capsys.readouterr().err == ""
