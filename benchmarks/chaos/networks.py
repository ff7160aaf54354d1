"""Network namespaces of a chaos run: one for the hub and one for each peer, and links that can be cut silently.

Frames are dropped by the kernel where the peer's link begins, so connections are not reset: nobody is notified. Linux
and root only.
"""

import os
import shutil
import subprocess
import sys

from benchmarks.chaos.config import CUTS, Kind
from benchmarks.netns.lab import KernelTestbed
from benchmarks.netns.namespaces import run

_RULES: dict[Kind, tuple[str, ...]] = {"cut": ("input", "output"), "deaf": ("input",), "mute": ("output",)}
assert set(_RULES) == set(CUTS)


def missing() -> str | None:
    """Why links cannot be cut here; None if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program) is None:
            return f"cutting links needs `{program}`: apt-get install {package}"
    try:
        with Networks(1) as networks:
            networks.cut(0, "cut")
    except subprocess.CalledProcessError as error:
        return f"this kernel does not let us cut links: {error.stderr.strip()}"
    return None


class Networks(KernelTestbed):
    """Machine 0 is the hub's; peer `index` has machine 1 + index. Lines are as fast as they can be."""

    def __init__(self, peers: int) -> None:
        super().__init__(1 + peers, network="203.0.113")
        self.dead: set[int] = set()
        """Peers whose links are cut."""

    def prefix(self, machine: int) -> list[str]:
        """Before a command that shall run there."""
        return ["ip", "netns", "exec", self.namespace(machine)]

    def cut(self, peer: int, kind: Kind) -> None:
        chains = "\n".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; "
            f'{"iifname" if hook == "input" else "oifname"} "eth0" drop; }}'
            for hook in _RULES[kind]
        )
        run(*self.prefix(1 + peer), "nft", f"table ip chaos {{\n{chains}\n}}")
        self.dead.add(peer)

    def mend(self, peer: int) -> None:
        """Whatever was cut."""
        run(*self.prefix(1 + peer), "nft", "add table ip chaos; delete table ip chaos")
        self.dead.discard(peer)
