"""`thinpipe watch`: live view of a run in the terminal or as a web page, from its event log alone. Does not affect the
run."""

import time

from rich.console import Console
from rich.live import Live

from thinpipe.config.commands import WatchConfig
from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import refuse_missing_run
from thinpipe.monitor.log_follower import POLL_SECONDS, LogFollower
from thinpipe.monitor.terminal import plain_lines, render


def run(config: WatchConfig) -> int:
    if config.run.exists() and not config.run.is_dir():
        raise UserError(f"{config.run} is a file: name the dump_folder of a run")
    refuse_missing_run(config.run)
    if config.dashboard:
        from thinpipe.monitor.web_server import serve_until_stopped

        return serve_until_stopped(config.run, config.host, config.port)
    console, follower = Console(highlight=False), LogFollower(config.run)
    if config.once or not console.is_terminal:
        if not follower.path.is_file():
            raise UserError(f"{follower.path} does not exist: name the dump_folder of a run")
        follower.poll()
        snapshot = follower.run_state.snapshot()
        if console.is_terminal:
            console.print(render(snapshot, time.time(), width=console.width))
        else:
            print(*plain_lines(snapshot, time.time()), sep="\n")
        if follower.unknown:
            console.print(
                f"{follower.unknown} line(s) of the log were written by another version of thinpipe: left out"
            )
        return 0
    return _live(console, follower)


def _live(console: Console, follower: LogFollower) -> int:
    """Redraws until the run has finished or Ctrl+C. Goes on for a stopped run, which may be resumed."""
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            follower.poll()
            snapshot = follower.run_state.snapshot()
            live.update(render(snapshot, time.time(), width=console.width), refresh=True)
            if snapshot.state == "finished":
                return 0
            time.sleep(POLL_SECONDS)
