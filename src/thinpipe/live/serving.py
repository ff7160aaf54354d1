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

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_END_SECONDS = 10.0


@contextmanager
def serving(folder: Path, host: str = LOOPBACK, port: int = 0) -> Iterator[str]:
    """The address of the page; it is there when this returns."""
    for module in ("starlette", "uvicorn"):
        need(module, extra="dashboard", what="the page")
    import uvicorn

    from thinpipe.live.page import Page

    local = host in ("localhost", "127.0.0.1", "::1")
    following = Following(folder)
    following.look()  # a log that cannot be read is refused here
    application = Page(following).application(_LOCAL_NAMES if local else ("*",))
    with _listening(host, port) as listener:
        settings = uvicorn.Config(application, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listener],), name="thinpipe-page", daemon=True)
        thread.start()
        try:
            yield f"http://{'[' + host + ']' if ':' in host else host}:{listener.getsockname()[1]}/"
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


def serve_until_stopped(folder: Path, host: str, port: int) -> int:
    with serving(folder, host, port) as address:
        print(f"the page of {folder} is at {address} (Ctrl+C ends it)", flush=True)
        threading.Event().wait()
    return 0
