"""Memory that a run may use on a device and on its host, beside what the run's tensors need (`segment_costs.py`).

What a process takes beside tensors is assumed here, in one place, until `thinpipe selftest` has measured the device
(`calibration.py`). Imports no torch.
"""

from dataclasses import dataclass, field

from thinpipe.core.errors import UserError
from thinpipe.planning.calibration import Calibration
from thinpipe.planning.partition import SegmentNeeds

CONTEXT_NBYTES = 500_000_000
"""Bytes of an accelerator's memory that a process takes for its context and libraries. Assumed, not measured."""
FRAGMENTATION_SHARE = 0.05
"""Part of an accelerator's memory that torch's caching allocator reserves and no tensor uses. Assumed."""
PROCESS_NBYTES = 400_000_000
"""Bytes of host memory that a training process takes for Python, torch and its libraries. Measured with torch's build
for processors, 396 MB (docs/concepts/plan.md); builds for accelerators take more."""
_OTHER_PROGRAMS_SHARE, _OTHER_PROGRAMS_SHARE_OF_HOST = 0.05, 0.2
"""Parts of the free memory of an accelerator, and of a host, that a peer leaves to other programs of its owner."""
COPY_BYTES_PER_SECOND = 12e9
"""Rate of copies between pinned host memory and an accelerator. Assumed: PCIe 4.0 with eight lanes, or 3.0 with 16."""


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Free memory of the device of one or several processes of this machine, before they have tensors."""

    place: str
    """The device in words, for example cuda:0 (NVIDIA GeForce RTX 3060)."""
    free_nbytes: int
    """Free bytes of the device, beside the context of this process."""
    host_free_nbytes: int | None = None
    """Free bytes of the host. None: the device computes in the host's memory."""
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def is_host(self) -> bool:
        return self.host_free_nbytes is None

    @property
    def process_nbytes(self) -> int:
        """Bytes of the device that one more process takes beside its tensors."""
        assumed = PROCESS_NBYTES if self.is_host else CONTEXT_NBYTES
        return assumed if self.calibration.overhead_nbytes is None else self.calibration.overhead_nbytes

    @property
    def fragmentation_share(self) -> float:
        share = self.calibration.fragmentation_share
        return (0.0 if self.is_host else FRAGMENTATION_SHARE) if share is None else share

    @property
    def usable_nbytes(self) -> int:
        """Bytes of the device that tensors can use, if a run has all free memory."""
        return int(self.free_nbytes * (1 - self.fragmentation_share))

    @property
    def activation_factor(self) -> float:
        return self.calibration.activation_factor or 1.0

    def device_nbytes(self, need: SegmentNeeds) -> int:
        """Bytes of the device that a segment takes: nothing is offloaded by a device in the host's memory."""
        return need.memory_nbytes + (need.host_nbytes if self.is_host else 0)

    def offered_nbytes(self, limit_nbytes: int | None = None) -> int:
        """Bytes of the device that a peer offers to a run: the owner has other programs, and may have set a limit.
        Raises UserError for a limit below 1."""
        if limit_nbytes is not None and limit_nbytes < 1:
            raise UserError(
                f"a memory limit of {limit_nbytes} bytes leaves nothing to train with: leave it out, or raise it"
            )
        others = _OTHER_PROGRAMS_SHARE_OF_HOST if self.is_host else _OTHER_PROGRAMS_SHARE
        offered = int(self.free_nbytes * (1 - self.fragmentation_share - others))
        return offered if limit_nbytes is None else min(offered, limit_nbytes)

    @property
    def offered_host_nbytes(self) -> int | None:
        """Bytes of host memory that a peer offers for offloaded state; None: the device computes in host memory."""
        if self.host_free_nbytes is None:
            return None
        return int(self.host_free_nbytes * (1 - _OTHER_PROGRAMS_SHARE_OF_HOST))
