"""`thinpipe watch`: a run in the terminal, or as a page, from its event log alone. The run notices nothing of it."""

import time

from rich.console import Console
from rich.live import Live

from thinpipe.core.errors import UserError
from thinpipe.live.follow import LOOK_SECONDS, Following
from thinpipe.live.settings import WatchConfig
from thinpipe.live.terminal import render


def run(config: WatchConfig) -> int:
    if config.run.exists() and not config.run.is_dir():
        raise UserError(f"{config.run} is a file: name the dump_folder of a run")
    if config.dashboard:
        from thinpipe.live.serving import serve_until_stopped

        return serve_until_stopped(config.run, config.host, config.port)
    console, following = Console(highlight=False), Following(config.run)
    if config.once or not console.is_terminal:
        if not following.path.is_file():
            raise UserError(f"{following.path} does not exist: name the dump_folder of a run")
        following.look()
        console.print(render(following.story.picture(), time.time(), width=console.width))
        if following.unknown:
            console.print(f"{following.unknown} line(s) of the log are of another version of thinpipe, and left out")
        return 0
    return _live(console, following)


def _live(console: Console, following: Following) -> int:
    """Until the run has finished, or Ctrl+C. A run that was stopped may go on."""
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            following.look()
            picture = following.story.picture()
            live.update(render(picture, time.time(), width=console.width), refresh=True)
            if picture.state == "finished":
                return 0
            time.sleep(LOOK_SECONDS)
