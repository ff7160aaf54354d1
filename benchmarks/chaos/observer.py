"""Looks at a chaos run while it goes on: events and commits that the hub writes, programs that ended, what they use."""

import time
from collections.abc import Callable

import msgspec

from benchmarks.chaos.attacks.catalogue import names_attacker
from benchmarks.chaos.config import HUB
from benchmarks.chaos.log import AnyRecord, Committed, Exited, Happened, Hashed, Named, Raised, Sampled
from benchmarks.chaos.processes import use_of
from benchmarks.chaos.testbed import Testbed
from benchmarks.chaos.workload import ENDLESS_STEPS
from thinpipe.core.events import AnyEvent, Step
from thinpipe.core.files import file_sha256
from thinpipe.core.log_tail import Tail
from thinpipe.core.run_folder import checkpoints_path, events_path, step_folders

SAMPLE_SECONDS = 5.0
_TRACEBACK = "Traceback (most recent call last)"
_EVENTS: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class _Commit(msgspec.Struct):
    """What we read of a line of the hub's list."""

    step: int
    files: dict[str, str]


class RunObserver:
    """`poll` as often as possible; all that is new goes to `tell`. `clock` says the seconds of the run."""

    def __init__(
        self,
        bed: Testbed,
        tell: Callable[[AnyRecord], None],
        clock: Callable[[], float],
        known: dict[int, dict[str, str]],
    ) -> None:
        """`known`: commits that are in the log already."""
        self._bed, self._tell, self._clock = bed, tell, clock
        self._events = Tail(events_path(bed.dump_folder))
        self._list = Tail(bed.dump_folder / "commits.jsonl", whole=True)
        self._hub_says = [Tail(bed.printed(HUB)), Tail(bed.dump_folder / "hub" / "hub.log")]
        self._known = dict(known)
        self._exited: set[int] = set()
        self._in_traceback = False
        self._sampled = 0.0
        self.steps = 0
        """Highest that was seen."""
        self.executed = 0
        """Seen since this watch began."""
        self.commits = max(known, default=0)
        """The newest."""

    def poll(self) -> None:
        self._look_at_events()
        self._look_at_commits()
        self._look_at_programs()
        self._listen_to_hub()
        if time.monotonic() - self._sampled > SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            self._sample()

    def _now(self) -> dict[str, float]:
        return {"time_s": time.time(), "clock_s": round(self._clock(), 3)}

    def _look_at_events(self) -> None:
        for line in self._events.lines():
            try:
                event = _EVENTS.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # cut short when the hub was killed
            if isinstance(event, Step):
                if event.step <= ENDLESS_STEPS:  # others are forged
                    self.steps, self.executed = max(self.steps, event.step), self.executed + 1
                event = msgspec.structs.replace(event, links=[], busy=[], memory=[])
            self._tell(Happened(**self._now(), event=event))

    def _look_at_commits(self) -> None:
        """By the hub's own list, from its beginning: what was written during a break belongs to the run."""
        for line in self._list.lines():
            commit = msgspec.json.decode(line, type=_Commit)
            if self._known.pop(commit.step, None) != commit.files:
                self._tell(Committed(**self._now(), step=commit.step, files=commit.files))
                self.commits = max(self.commits, commit.step)

    def hash_disk(self) -> None:
        """What lies on the hub's disk, byte for byte."""
        for folder in reversed(step_folders(checkpoints_path(self._bed.dump_folder))):
            step = int(folder.name.removeprefix("step-"))
            if step:
                files = {path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))}
                self._tell(Hashed(**self._now(), step=step, files=files))

    def _look_at_programs(self) -> None:
        for name, program in self._bed.programs.items():
            if program.running or program.ended_by_us or program.pid in self._exited:
                continue
            self._exited.add(program.pid)
            self._tell(Exited(**self._now(), who=name, code=program.process.returncode, tail=program.tail))

    def _listen_to_hub(self) -> None:
        for tail in self._hub_says:
            for line in tail.lines():
                text = line.decode(errors="replace")
                self._look_for_traceback(text)
                if names_attacker(text):
                    self._tell(Named(**self._now(), text=text[:500]))

    def _look_for_traceback(self, line: str) -> None:
        """Its last line is the first one that is not indented."""
        if line.startswith(_TRACEBACK):
            self._in_traceback = True
        elif self._in_traceback and not line.startswith(" "):
            self._in_traceback = False
            self._tell(Raised(**self._now(), text=line[:300]))

    def _sample(self) -> None:
        for name, pid in self._bed.pids().items():
            if (use := use_of(pid)) is not None:
                self._tell(Sampled(**self._now(), who=name, pid=pid, rss_nbytes=use.rss_nbytes, handles=use.handles))
