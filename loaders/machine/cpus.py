"""CPUs beside a GPU, for plans of other machines: what they read from RAM and multiply, by kinds of computers.

RAM: what programs read, about 0.65 to 0.75 of the data sheet's figure. Two channels of DDR5-6000 have 96 GB/s, of which
a Ryzen 7800X3D reads 60 to 62 (https://www.reddit.com/r/LocalLLaMA/comments/1lwnj5x); of DDR4-3200, 51; eight channels
of DDR5-5200, 333; twelve of DDR5-4800, 461. Products: what the kernels for Q4_K multiply on one Zen 4 core with one row
(docs/results/mixtures.md), and with many rows on AVX2 (half of what AVX-512 does there).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WEIGHTS_PER_S, FLOPS = 17e9, 80e9  # of a core: packed weights times one row; with many rows
_ROWS = (1, 2, 4, 16, 128)


@dataclass(frozen=True)
class KnownCpu:
    """A kind of computer: for people; cores; bytes/s that programs read from RAM."""

    name: str
    num_cores: int
    ram_bytes_per_s: float

    def flops(self, bytes_per_weight: float, ram_bytes_per_s: float | None = None) -> Mapping[int, float]:
        """Rows → FLOP/s with packed weights in RAM. ram_bytes_per_s: in place of its own."""
        ram = ram_bytes_per_s or self.ram_bytes_per_s
        weights_per_s = min(ram / bytes_per_weight, WEIGHTS_PER_S * self.num_cores)
        return {rows: min(2 * rows * weights_per_s, FLOPS * self.num_cores) for rows in _ROWS}


DESKTOP = "desktop"
KNOWN_CPUS = {
    DESKTOP: KnownCpu("desktop, two channels of DDR5", 8, 60e9),
    "desktop-ddr4": KnownCpu("desktop, two channels of DDR4", 8, 38e9),
    "workstation": KnownCpu("workstation, eight channels of DDR5", 24, 240e9),
    "server": KnownCpu("server, twelve channels of DDR5", 48, 340e9),
}
