"""Records `thinpipe up` with one of four peers killed in the middle and back: up.cast and up.svg beside this file.

    python docs/recording/make.py            # two minutes on two idle cores; needs tmux and the extra `swarm`
    python docs/recording/make.py --draw     # the picture alone, from the recording that is there

What is typed and shown is real: two panes of a tmux session, read five times a second. `asciinema play up.cast` plays
the recording.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from draw import svg_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COLUMNS, ROWS_ABOVE, ROWS_BELOW = 100, 18, 6
TITLE = "thinpipe up: four peers, one is killed and comes back; four times as fast as it was"
UP = "thinpipe up examples/friends.toml --peers 4 --training.steps 60 --training.seq-len 64 --checkpoint.interval 10"
KILL = "pkill -9 -f runs/friends/peers/p2"
COME_BACK = "thinpipe join runs/friends/peers/p2 | grep -v measur"
READ_SECONDS = 0.2


class Terminal:
    """Two panes, one above the other, of a tmux server of its own."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux")
        self.frames: list[tuple[float, str]] = []
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TERM": "xterm-256color",
        }
        shell = "env PS1='$ ' bash --norc --noprofile"
        size = ("-x", str(COLUMNS), "-y", str(ROWS_ABOVE + 1 + ROWS_BELOW))
        self._tmux("-f", "/dev/null", "new-session", "-d", "-s", "r", *size, "-c", str(folder), shell, env=environment)
        self._tmux("set", "-g", "status", "off")
        self._tmux("set", "-g", "default-terminal", "tmux-256color")
        self._tmux("split-window", "-v", "-l", str(ROWS_BELOW), "-c", str(folder), shell)
        self._began, self._over = time.monotonic(), threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        command = ("tmux", "-S", self._socket, *words)
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout

    def screen(self) -> str:
        above, below = (self._tmux("capture-pane", "-e", "-p", "-t", f"r:0.{pane}").split("\n") for pane in (0, 1))
        return "\n".join([*above[:ROWS_ABOVE], "─" * COLUMNS, *below[:ROWS_BELOW]])

    def _read(self) -> None:
        while not self._over.wait(READ_SECONDS):
            screen = self.screen()
            if not self.frames or screen != self.frames[-1][1]:
                self.frames.append((time.monotonic() - self._began, screen))

    def type(self, pane: int, line: str) -> None:
        for letter in line:
            self._tmux("send-keys", "-t", f"r:0.{pane}", "-l", letter)
            time.sleep(0.03)
        time.sleep(0.5)
        self._tmux("send-keys", "-t", f"r:0.{pane}", "Enter")

    def close(self) -> None:
        """Ends what runs in it, which at the end of a recording is nothing."""
        self._over.set()
        self._reader.join()
        for pane in (1, 0):
            self._tmux("send-keys", "-t", f"r:0.{pane}", "C-c")
        time.sleep(10)
        self._tmux("kill-server")


def wait_until(true: Callable[[], bool], seconds: float = 900.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("what the recording waits for has not happened")
        time.sleep(0.1)


def record(folder: Path) -> list[tuple[float, str]]:
    (folder / "examples").symlink_to(ROOT / "examples")
    words = (
        "tokenize",
        "--sources",
        "sample:train",
        "--validation-sources",
        "sample:validation",
        "--vocab-size",
        "2048",
    )
    subprocess.run([sys.executable, "-m", "thinpipe", *words, "--output", "tokens"], cwd=folder, check=True)
    log = folder / "runs/friends/events.jsonl"

    def happened(kind: str, **what: object) -> bool:
        """Whether the run has logged an event with at least these values."""
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return any(
            event["event"] == kind and all(event[key] >= value for key, value in what.items()) for event in events
        )

    terminal = Terminal(folder)
    try:
        time.sleep(1)
        terminal.type(0, UP)
        wait_until(lambda: happened("step", step=30))
        terminal.type(1, KILL)
        wait_until(lambda: happened("peer_left"))
        time.sleep(3)
        terminal.type(1, COME_BACK)
        wait_until(lambda: "finished: the trained model" in terminal.screen())
        time.sleep(3)
    finally:
        terminal.close()
    return terminal.frames


def cast_of(frames: list[tuple[float, str]]) -> str:
    """asciicast, version 2; every event paints the whole screen."""
    height = ROWS_ABOVE + 1 + ROWS_BELOW
    head = {"version": 2, "width": COLUMNS, "height": height, "title": TITLE, "idle_time_limit": 2}
    events = [[round(seconds, 2), "o", "\x1b[H\x1b[2J" + text.replace("\n", "\r\n")] for seconds, text in frames]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [head, *events])


def main() -> None:
    parser = argparse.ArgumentParser(description="Records `thinpipe up` with a kill in the middle.")
    parser.add_argument("--draw", action="store_true", help="only draw up.svg from up.cast")
    if not parser.parse_args().draw:
        with tempfile.TemporaryDirectory() as folder:
            (HERE / "up.cast").write_text(cast_of(record(Path(folder))), encoding="utf-8")
    (HERE / "up.svg").write_text(svg_of((HERE / "up.cast").read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
