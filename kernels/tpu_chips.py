"""Facts about TPU chips that kernels depend on, by JAX's names of the chips."""

from __future__ import annotations

SMALL_VMEM = ("TPU v4",)  # 16 MiB in all; later chips have 64 or more
MEGACORE = ("TPU v4", "TPU v5", "TPU v5p")  # chips whose two cores are one device
MEBI = 2**20
