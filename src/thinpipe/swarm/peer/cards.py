"""`thinpipe join`: in this process for one invite; for several, one process for each, which lends a card of its own.

A child is a peer like any other: it has its own invite, key, folder and lock, as if its card were in another machine.
The standard input of a child is a pipe that this process holds. The child leaves its run in order when this process
asks for that (Ctrl+C), and when the pipe closes because this process was killed. A child that ends is not started
again: the others go on.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from rich.console import Console

from thinpipe.config.hub import JoinConfig
from thinpipe.core.errors import UserError
from thinpipe.core.folder_lock import run_lock
from thinpipe.core.process_group import NEW_PROCESS_GROUP
from thinpipe.core.program_output import log_to_file, plain_console
from thinpipe.swarm.peer.accept_invite import load_or_join
from thinpipe.swarm.peer.disclosure import Disclosure
from thinpipe.swarm.protocol.messages import EXIT_TEMPFAIL
from thinpipe.training.graceful_shutdown import StopRequest, follow_parent

_CHILD_VARIABLE = "THINPIPE_JOIN_CHILD"
"""Environment variable of a child: its standard input says when to leave."""
_POLL_SECONDS = 0.1
_IN_USE_BY = (
    "another `thinpipe join`: stop that process first (kill it if it does not react to Ctrl+C), or join with another "
    "invite and another --folder"
)


def run(config: JoinConfig) -> int:
    """Exit code as of `join.run`; of several processes, that of the first that failed, or 1 if a signal ended it."""
    if config.more:
        return _lend(config)
    if _CHILD_VARIABLE in os.environ:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
        follow_parent(at_end=signal.SIGINT, piped_output=True)
    if config.base is not None and not config.base.is_dir():
        raise UserError(f"--base {config.base} is no folder: name one with the model's safetensors files")
    console = plain_console()
    disclosure = Disclosure(console.print, config)
    identity, folder = load_or_join(config, disclosure.tell, console.print)
    with run_lock(folder, _IN_USE_BY, private=True), log_to_file(folder / "peer.log"):
        console.print(f"this machine is {identity.name} in run {identity.run}; loading torch")
        from thinpipe.swarm.peer import join  # imports torch: an invite is refused before

        return join.run(join.PeerProcess(identity, folder, config, console, disclosure))


def _lend(config: JoinConfig) -> int:
    from thinpipe.device.choice import one_accelerator_each

    console, invites = plain_console(), (config.invite, *config.more)
    devices = [str(device) for device in one_accelerator_each(config.device, len(invites))]
    console.print(f"lending {len(devices)} cards, each as a peer: {', '.join(devices)}; Ctrl+C leaves the run with all")
    children = list[_Child]()
    with StopRequest() as stop:
        try:
            for index, (invite, device) in enumerate(zip(invites, devices, strict=True)):
                arguments = config.arguments(invite, device, index)
                children.append(_Child(device, _start(arguments), console))
            asked = False
            while any(child.process.poll() is None for child in children):
                if stop.requested and not asked:
                    asked = True
                    for child in children:
                        child.ask_to_leave()
                time.sleep(_POLL_SECONDS)
        finally:  # a second Ctrl+C, or an error
            for child in children:
                child.process.kill()
                child.reader.join()
    codes = [child.exit_code() for child in children]
    failed = [code for code in codes if code not in (0, EXIT_TEMPFAIL)]
    return (1 if failed[0] < 0 else failed[0]) if failed else max(codes)


def _start(arguments: list[str]) -> "subprocess.Popen[str]":
    """In a process group of its own, so that Ctrl+C reaches the parent alone."""
    command = [sys.executable, "-m", "thinpipe", "join", *arguments]
    environment = {**os.environ, _CHILD_VARIABLE: "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        env=environment,
        text=True,
        errors="replace",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
        creationflags=NEW_PROCESS_GROUP,
    )


@dataclass
class _Child:
    """Process of one card."""

    device: str
    process: "subprocess.Popen[str]"
    console: Console

    def __post_init__(self) -> None:
        assert self.process.stdout is not None
        self.reader = threading.Thread(target=self._print, args=(self.process.stdout,), daemon=True)
        self.reader.start()

    def _print(self, output: IO[str]) -> None:
        """Prints what the process prints, with its device before each line, and how it ended."""
        for line in output:
            self.console.print(f"{self.device}: {line.rstrip()}")
        code = self.process.wait()
        if code not in (0, EXIT_TEMPFAIL):
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self.console.print(f"{self.device}: its process {how}; other cards go on")

    def ask_to_leave(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # the process has ended
            self.process.stdin.write(chr(signal.SIGINT))
            self.process.stdin.flush()

    def exit_code(self) -> int:
        return self.process.wait()
