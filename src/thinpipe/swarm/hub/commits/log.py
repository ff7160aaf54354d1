"""The commit log on the hub's disk, append-only, one JSON object per line.

A record is written after its checkpoint is durable and before any peer learns of the commit. If a crash truncates the
last line, the record of the checkpoint, which is complete, is written again. Nothing is removed; a record takes some
150 bytes per checkpoint file.
"""

from pathlib import Path

from thinpipe.core.durable_lines import DurableLines
from thinpipe.swarm.hub.commits.history import Commit, CommitHistory

COMMIT_LOG_FILE = "commits.jsonl"


class CommitLog(DurableLines[Commit]):
    """`max_records`: see `CommitHistory`."""

    def __init__(self, path: Path, *, max_records: int = 0) -> None:
        self.history = CommitHistory(max_records=max_records)
        super().__init__(path, Commit, self.history.add)

    def append(self, commit: Commit) -> None:
        if not self.history.accepts(commit):
            raise ValueError(f"step {commit.step} is committed already")
        super().append(commit)
        self.history.add(commit)
