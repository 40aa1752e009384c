"""The GPU's division of paged attention's work; import after the check that Triton is installed.

As many programs as `active` share `total` blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jaxinfer.kernels.paged_attention.gpu_kernel import program_at, share_start


@triton.jit
def divide(
    active,
    total,
    first,
    starts,  # [512], active + 1 of them are used
    owner,  # [4096], from the block `first` on
):
    program = tl.arange(0, 512)
    tl.store(starts + program, share_start(program, active, total))
    lane = tl.arange(0, 4096)
    tl.store(owner + lane, program_at(first + lane, active, total))
