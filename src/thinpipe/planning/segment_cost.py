"""FLOPs and bytes of one segment, as `segment_costs.py` counts them from the shapes of its parameters."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """FLOPs and bytes of one segment."""

    parameters: int
    """Number of trainable parameters."""
    forward_flops_per_token: float
    backward_flops_per_token: float
    """Backward pass, with the recomputation of checkpointed blocks."""
    weights_nbytes: int
    gradients_nbytes: int
    optimiser_nbytes: int
    activation_nbytes: int
    """Activations saved by one micro-batch between its forward and its backward pass."""
    peak_extra_nbytes: int
    """Additional bytes while the segment computes."""
    copies_nbytes: int = 0
    """bfloat16 copies of weights, from the first forward to the last backward pass of a step."""
    offloaded_nbytes: int = 0
    """Part of `optimiser_nbytes` that is in the host's memory, if the device has memory of its own."""
    masters_nbytes: int = 0
    """Part of `weights_nbytes` that is in the host's memory in float32, with bfloat16 copies on the device."""
    slices_nbytes: int = 0
    """Bytes of the float32 slices in which a device with memory of its own updates, when activations are gone."""
    frozen_nbytes: int = 0
    """Weights that are not trained, as they are kept on the device."""
    download_nbytes: int = 0
    """The segment's part of a published base, as it is stored."""
    streamed: tuple[tuple[int, int], ...] = ()
    """Rows, and bytes of a row, of each parameter's state that comes from the host for the update and returns."""
    tables_nbytes: int = 0
    """Part of `weights_nbytes`: tables looked up by token, bigram or position, and the matrices that project their rows
    up."""

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token, forward and backward."""
        return self.forward_flops_per_token + self.backward_flops_per_token

    @property
    def host_nbytes(self) -> int:
        """Bytes of the host's memory."""
        return self.offloaded_nbytes + self.masters_nbytes

    @property
    def device_weights_nbytes(self) -> int:
        """Bytes of the weights on a device with memory of its own."""
        return self.weights_nbytes - self.masters_nbytes // 2

    @property
    def state_nbytes(self) -> int:
        """Bytes of weights and optimizer moments: the segment's checkpoint size without codec state."""
        return self.weights_nbytes + self.optimiser_nbytes
