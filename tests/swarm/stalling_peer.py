"""`thinpipe join` whose training thread blocks in the next step after SIGUSR1, until SIGUSR2. Its heart goes on."""

import signal
import sys
import threading
import time

from thinpipe.cli import main
from thinpipe.swarm.peer.remote_run import RemoteRun

_stop, _go_on = threading.Event(), threading.Event()
_asked = RemoteRun.asked_to_stop


def _asked_to_stop(self: RemoteRun) -> bool:
    """Called in the middle of every step."""
    if _stop.is_set():
        print("stalled", flush=True)
        while not _go_on.is_set():
            time.sleep(0.1)
        _stop.clear()
        print("awake", flush=True)
    return _asked(self)


if __name__ == "__main__":
    RemoteRun.asked_to_stop = _asked_to_stop
    signal.signal(signal.SIGUSR1, lambda *_: _stop.set())
    signal.signal(signal.SIGUSR2, lambda *_: _go_on.set())
    sys.exit(main())
