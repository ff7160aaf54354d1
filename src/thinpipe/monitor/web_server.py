"""Serves the web page of a run with uvicorn in a background thread."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinpipe.config.commands import LOOPBACK
from thinpipe.core.errors import UserError
from thinpipe.core.extras import require_extra
from thinpipe.monitor.log_follower import LogFollower

_SHUTDOWN_SECONDS, _POLL_SECONDS = 10.0, 0.5


@contextmanager
def serving(folder: Path, host: str = LOOPBACK, port: int = 0) -> Iterator[str]:
    """Serves the page within the `with` block and yields its URL, which accepts connections from then on. Port 0 picks
    a free one."""
    with _serve_in_thread(folder, host, port) as (address, _):
        yield address


def serve_until_stopped(folder: Path, host: str, port: int) -> int:
    """Serves the page until Ctrl+C (KeyboardInterrupt); returns exit code 1 if the server ends by itself."""
    with _serve_in_thread(folder, host, port) as (address, thread):
        print(f"the web page of {folder} is at {address}; Ctrl+C stops it", flush=True)
        while thread.is_alive():
            thread.join(_POLL_SECONDS)  # on Windows a join without timeout ignores Ctrl+C
    return 1


@contextmanager
def _serve_in_thread(folder: Path, host: str, port: int) -> Iterator[tuple[str, threading.Thread]]:
    for module in ("starlette", "uvicorn"):
        require_extra(module, extra="dashboard", feature="the web page")
    import uvicorn

    from thinpipe.monitor.web import Page

    application = Page(LogFollower(folder)).application(("localhost", host, socket.gethostname()))
    with _listening(host, port) as listener:
        settings = uvicorn.Config(application, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listener],), name="thinpipe-page", daemon=True)
        thread.start()
        try:
            yield f"http://{'[' + host + ']' if ':' in host else host}:{listener.getsockname()[1]}/", thread
        finally:
            server.should_exit = True
            thread.join(_SHUTDOWN_SECONDS)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listening socket; browsers that connect before the server runs wait for its answer. Raises UserError if the port
    cannot be used."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(
            f"the web page cannot be served at {host}:{port} ({error.strerror}): choose another port"
        ) from None
    with listener:
        yield listener
