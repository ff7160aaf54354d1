"""Serves the page of a run from a thread, for as long as somebody wants it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.core.extras import need
from thinpipe.live.follow import Following
from thinpipe.live.settings import LOOPBACK

_END_SECONDS, _LOOK_SECONDS = 10.0, 0.5


@contextmanager
def serving(folder: Path, host: str = LOOPBACK, port: int = 0) -> Iterator[str]:
    """The address of the page; it is there when this returns."""
    with _in_a_thread(folder, host, port) as (address, _):
        yield address


def serve_until_stopped(folder: Path, host: str, port: int) -> int:
    """Until Ctrl+C; exit code 1 when the server ends by itself."""
    with _in_a_thread(folder, host, port) as (address, thread):
        print(f"the page of {folder} is at {address} (Ctrl+C ends it)", flush=True)
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)  # on Windows a wait without end does not hear Ctrl+C
    return 1


@contextmanager
def _in_a_thread(folder: Path, host: str, port: int) -> Iterator[tuple[str, threading.Thread]]:
    for module in ("starlette", "uvicorn"):
        need(module, extra="dashboard", what="the page")
    import uvicorn

    from thinpipe.live.page import Page

    application = Page(Following(folder)).application(("localhost", host, socket.gethostname()))
    with _listening(host, port) as listener:
        settings = uvicorn.Config(application, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listener],), name="thinpipe-page", daemon=True)
        thread.start()
        try:
            yield f"http://{'[' + host + ']' if ':' in host else host}:{listener.getsockname()[1]}/", thread
        finally:
            server.should_exit = True
            thread.join(_END_SECONDS)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """From here on browsers can connect; they wait for an answer until the server runs."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"the page cannot be served at {host}:{port} ({error.strerror}): choose another port") from None
    with listener:
        yield listener
