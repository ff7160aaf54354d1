"""Table of common devices with the peak FLOP/s that vendors publish. Training reaches a fraction of the peak.

Peaks are for dense matrix products, without sparsity: bfloat16 with float32 accumulation, as under autocast, and plain
float32, torch's default (no TF32). Memory is the vendor's figure, taken as 10^9 bytes per GB: the bytes that a device
has beyond that are about what drivers and libraries take.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Device:
    """Peak speed and memory of a device."""

    bf16_tflops: float
    fp32_tflops: float
    memory_gb: float | None = None
    """None: the size varies, so the machines file must give it."""

    def peak_flops(self, precision: Precision) -> float:
        return 1e12 * (self.bf16_tflops if precision == "bf16" else self.fp32_tflops)


# "Twice float32" is the ratio of all GeForce cards in NVIDIA's whitepapers of these families; where a card is not in
# them, its float32 peak is 2 x cores x boost clock of its product page.
DEVICES: dict[str, Device] = {
    # NVIDIA Ampere GA102 GPU Architecture, whitepaper, 2020 (3070 to 3090). 3060: derived, 3584 cores at 1.777 GHz.
    "RTX 3060": Device(25.5, 12.7, 12),
    "RTX 3070": Device(40.6, 20.3, 8),
    "RTX 3080": Device(59.5, 29.8, 10),
    "RTX 3090": Device(71.0, 35.6, 24),
    # NVIDIA Ada GPU Architecture, whitepaper, 2022 (4080, 4090). Derived: 4060 Ti, 4352 cores at 2.535 GHz;
    # 4070, 5888 at 2.475 GHz; 4070 Ti, 7680 at 2.61 GHz. The 4060 Ti is also sold with 8 GB.
    "RTX 4060 Ti": Device(44.1, 22.1, 16),
    "RTX 4070": Device(58.3, 29.1, 12),
    "RTX 4070 Ti": Device(80.2, 40.1, 12),
    "RTX 4080": Device(97.5, 48.7, 16),
    "RTX 4090": Device(165.2, 82.6, 24),
    # NVIDIA RTX Blackwell GPU Architecture, whitepaper, 2025.
    "RTX 5070": Device(61.7, 30.9, 12),
    "RTX 5070 Ti": Device(87.9, 43.9, 16),
    "RTX 5080": Device(112.6, 56.3, 16),
    "RTX 5090": Device(209.5, 104.8, 32),
    # NVIDIA T4 and V100 (SXM2) data sheets, 2018 and 2020. They have no units for bfloat16, which is computed at the
    # speed of float32 at best; their float16 peaks, 65 and 125, are out of reach.
    "T4": Device(8.1, 8.1, 16),
    "V100": Device(15.7, 15.7, 32),
    # NVIDIA A10 data sheet, 2021. A10G: made for Amazon's EC2 G5 (2021), without a data sheet of its own; figures as
    # its users quote them.
    "A10": Device(125.0, 31.2, 24),
    "A10G": Device(70.0, 35.0, 24),
    # NVIDIA L4 and L40S data sheets, 2023; half of what they say with sparsity.
    "L4": Device(121.0, 30.3, 24),
    "L40S": Device(362.0, 91.6, 48),
    # NVIDIA A100 data sheet, 2021.
    "A100 40GB": Device(312.0, 19.5, 40),
    "A100 80GB": Device(312.0, 19.5, 80),
    # NVIDIA H100 and H200 data sheets, 2022 and 2023; half of what they say with sparsity. H100 is the SXM module.
    "H100": Device(989.0, 67.0, 80),
    "H100 PCIe": Device(756.0, 51.0, 80),
    "H200": Device(989.0, 67.0, 141),
    # AMD Instinct MI300X data sheet, 2023; Radeon RX 7900 XTX product page, 2022.
    "MI300X": Device(1307.4, 163.4, 192),
    "RX 7900 XTX": Device(122.8, 61.4, 24),
    # Apple: runs compute on the processor there, not on the GPU. Derived: performance cores x 32 operations a cycle
    # (four 128-bit multiply-adds) x clock: 8 at 3.5 GHz, 12 at 4.05 GHz, 12 at 4.5 GHz. The matrix units that
    # Accelerate may use are not published, and come on top.
    "M2 Max": Device(0.9, 0.9),
    "M3 Max": Device(1.56, 1.56),
    "M4 Max": Device(1.73, 1.73),
    # Processors. Derived: cores x 32 operations a cycle (two 256-bit multiply-adds) x clock of all cores at work.
    # Ryzen 9 7950X: 16 at 4.5 GHz, twice that in bfloat16 (AVX-512 BF16). Laptop: 8 cores at 2.5 GHz, a middling one.
    "Ryzen 9 7950X": Device(4.6, 2.3),
    "Laptop CPU": Device(0.64, 0.64),
}


RENTED_USD_PER_HOUR: dict[str, float] = {
    "RTX 4090": 0.50,
    "L40S": 1.00,
    "A100 80GB": 1.50,
    "H100": 2.70,
    "H200": 3.60,
}
"""Assumed prices of one rented card without a contract, about what smaller providers asked in spring 2026; others ask
up to three times as much. A machines file may name a card and its price ([rented])."""
RENTED_PRICES_OF = "spring 2026"


def find_device(name: str) -> tuple[str, Device]:
    """Canonical name and entry of a device; ignores case, spaces, punctuation and vendor names. Raises UserError if the
    device is not in the table."""
    by_key = {_key(known): known for known in DEVICES}
    known = by_key.get(_key(name))
    if known is None:
        close = difflib.get_close_matches(_key(name), by_key, n=3, cutoff=0.6)
        nearest = " or ".join(repr(by_key[key]) for key in close)
        advice = f"did you mean {nearest}?" if close else f"known are {', '.join(DEVICES)}."
        raise UserError(
            f"device {name!r} is not in the table: {advice} For another one write tflops and memory instead"
        )
    return known, DEVICES[known]


def is_same_device(name: str, other: str) -> bool:
    """True if both name one device; ignores what `find_device` ignores."""
    return _key(name) == _key(other)


def precision_of(config: RunConfig) -> Precision:
    """Precision of the run's matrix products. A float64 run counts as fp32: give its machines explicit tflops."""
    recipe = config.planned_recipe
    return "bf16" if recipe.weights == "bfloat16" or recipe.autocast_bf16 else "fp32"


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|radeon|apple|[^a-z0-9]", "", name.lower())
