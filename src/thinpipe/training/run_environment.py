"""Hooks of the training loop that differ between a local run (defaults below, mostly no-ops), a run with an observer
(`training.process`) and a run joined through a hub (`swarm.peer.remote_run.RemoteRun`)."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from thinpipe.core.events import AnyEvent, Started
from thinpipe.training.data_loading import TokenSource
from thinpipe.transport.collectives import Collectives, collectives_for


class RunEnvironment:
    """Hooks of a local run: data and checkpoints come from this machine. Called in the training thread."""

    tokens: TokenSource | None = None
    """Source of token batches; None: the folder `data.path`."""
    quiet = False
    """True: the run prints nothing on the console."""
    console: Console | None = None
    """Console on which this program prints its other lines; None: it prints no others."""
    stopping_text = (
        "saving after this step, then stopping; the same command goes on from there. Ctrl+C again ends it at once, "
        "without saving"
    )
    """What the first signal to stop does."""
    has_own_places = False
    """True: where the first weights lie is this machine's own, and their hashes are compared instead."""

    def collectives(self, group: dist.ProcessGroup | None) -> Collectives:
        """Collectives for the small per-step reductions: gradient norms, losses, stop requests."""
        return collectives_for(group)

    def step(self) -> AbstractContextManager[None]:
        """Context around every step, for stall detection."""
        return nullcontext()

    def fetch(self, layers: Collection[str], optional_layers: Collection[str]) -> None:
        """Downloads these layers of the checkpoint to resume from into the run folder.

        `optional_layers` may be absent from the checkpoint.
        """

    def ready(self, hashes: Mapping[str, str]) -> None:
        """Called once before the first step. Raises UserError if `hashes` (basis, fixed tables), settings or tokenizer
        differ from those of the other processes."""

    def lost_text(self, finished: int, saved: int) -> str:
        """What a second signal costs. `finished`, `saved`: the last step that was computed, and that was saved."""
        if finished == saved:
            return f"ended without waiting; nothing is lost, step {saved} was saved"
        origin = f"from step {saved}" if saved else "from the start: nothing was saved"
        return f"ended without saving: {finished - saved} steps are lost. The same command goes on {origin}"

    def own_event(self, started: Started) -> AnyEvent | None:  # noqa: ARG002
        """An event for the console and the log of this process alone, before `started`: who computes what."""
        return None

    def stop_text(self, *, own: bool) -> str:  # noqa: ARG002
        """What the console says of a stop that a signal or the hub has asked for, once everything is saved; empty: the
        text of the event. `own`: the signal came to this process."""
        return ""

    def on_event(self, event: AnyEvent) -> None:
        """Called with every event, after it was shown on the console and logged."""

    def name_of(self, process: int) -> str:
        """Name of a process (by rank) for events and messages."""
        return f"process {process}"

    def may_accuse(self, step: int) -> bool:  # noqa: ARG002
        """True if a process that fails twice in this step can be removed from the run; else the step is skipped."""
        return False

    def protected(self) -> Collection[Path]:
        """Paths of checkpoints that must not be deleted yet."""
        return ()

    def asked_to_stop(self) -> bool:
        """True if the hub or an observer asked the run to stop; signals to this process are handled elsewhere."""
        return False

    def stops_now(self) -> bool:
        """True if a run of a single process, which nobody has to agree with, ends before its next step."""
        return False

    def before_stop_request(self) -> None:
        """Called before every all-reduce of a step that tells the other processes that this one received a stop
        signal."""
