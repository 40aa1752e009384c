"""Flash attention on TPUs: one Pallas (Mosaic) kernel; its body: `tpu_kernel.py`.

Formula and contract: `api.py`. Heads of a multiple of 128 are read where they lie, in [R, T, N * H]
(a tile takes one head's lanes); others are transposed to [R, N, T, H] first, since a tile of lanes
cannot start between two registers.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.flash_attention.blocks import fit, steps_of, tile_kinds
from jaxinfer.kernels.flash_attention.rule import (
    NO_MASK,
    PLAIN,
    AttentionMask,
    Features,
    FlashArrays,
    FlashRule,
    Mod,
    decline_closures,
    features_of,
    features_of_call,
    key_of,
    tiling_key,
)
from jaxinfer.kernels.flash_attention.tpu_kernel import LANES, TpuFlashPlan, TpuFlashScalars, kernel
from jaxinfer.kernels.tuning import tuned

__all__ = ["TpuFlashTiling", "candidates", "flash_attention", "heuristic", "tiling_key"]

# SMEM for the list of steps; a core has 1 MiB or more. Longer lists need larger tiles.
MAX_STEP_BYTES = 2**18
SUBLANES = 16  # rows of a register of bfloat16


@dataclasses.dataclass(frozen=True)
class TpuFlashTiling:
    """Sizes of tiles of queries and keys. Results differ by rounding alone."""

    q_tile: int
    k_tile: int

    def __post_init__(self):
        if self.q_tile % SUBLANES or self.q_tile < 1:
            raise ValueError(f"q_tile {self.q_tile} is no multiple of {SUBLANES}")
        if self.k_tile % LANES or self.k_tile < 1:
            raise ValueError(f"k_tile {self.k_tile} is no multiple of {LANES}")


def heuristic(q, k, features: Features = PLAIN) -> TpuFlashTiling:
    """Return a tiling from shapes and types alone.

    512 x 512, so that a key that is fetched meets 512 queries, above the ratio of arithmetic to
    bytes (240 on a v5e) at which memory is the limit, and the scores of a tile take 1 MiB; more for
    lengths whose list of tiles would not fit SMEM.
    """
    T, S = q.shape[1], k.shape[1]
    wide = lambda size, unit: min(512, -(-size // unit) * unit)
    q_tile, k_tile = wide(T, SUBLANES if T < LANES else LANES), wide(S, LANES)
    mask = features.block_mask
    if mask is not None:
        return TpuFlashTiling(
            _fit(q_tile, mask.q_block, SUBLANES), _fit(k_tile, mask.k_block, LANES)
        )
    while k_tile < 2048 and 4 * -(-T // q_tile) * -(-S // k_tile) > MAX_STEP_BYTES:
        k_tile *= 2
    return TpuFlashTiling(q_tile, k_tile)


def _fit(tile: int, block: int, unit: int) -> int:
    """Return the largest multiple of `unit` up to `tile` that divides `block`."""
    if block % unit:
        raise NotImplementedError(f"blocks of {block} are no multiple of {unit}")
    return fit(max(1, tile // unit), block // unit) * unit


def candidates(
    q, k, _v, variant: AttentionVariant, mask: AttentionMask = NO_MASK, *,
    score_mod: Mod | None = None, **_: Any,
) -> list[TpuFlashTiling]:  # fmt: skip
    """Return the tilings worth measuring for the arguments of `flash_attention`."""
    features = features_of_call(variant, mask, score_mod)
    blocks, first = features.block_mask, heuristic(q, k, features)

    def fits(t: TpuFlashTiling) -> bool:
        return blocks is None or (blocks.q_block % t.q_tile == 0 and blocks.k_block % t.k_tile == 0)

    sizes = [(m, b) for m in (128, 256, 512, 1024) for b in (128, 256, 512, 1024, 2048)]
    T, S = max(q.shape[1], LANES), max(k.shape[1], LANES)
    found = [TpuFlashTiling(m, b) for m, b in sizes if m * b <= 2**19 and m < 2 * T and b < 2 * S]
    return [first, *(t for t in found if t != first and fits(t))]


def flash_attention(
    q,  # [R, T, N, H]
    k,  # [R, S, K, H]
    v,  # [R, S, K, H]
    arrays: FlashArrays,
    rule: FlashRule,
    *,
    tiling: TpuFlashTiling | None = None,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Return (out, lse or None). Declines (`NotImplementedError`) what Mosaic cannot compile."""
    decline_closures(rule)
    if not interpret and jnp.float16 in (q.dtype, k.dtype):
        raise NotImplementedError("Mosaic loads no float16; use bfloat16 or float32")
    (R, T), S = q.shape[:2], k.shape[1]
    if tiling is None:
        features = features_of(arrays, rule)
        key = key_of(q, k, features)
        tiling = tuned(heuristic(q, k, features), "flash_attention/tpu", key)
    M, B = tiling.q_tile, tiling.k_tile
    if arrays.block_mask is not None:
        M = _fit(M, arrays.block_mask.q_block, SUBLANES)
        B = _fit(B, arrays.block_mask.k_block, LANES)
    kinds = tile_kinds(rule, arrays, T, S, (M, B))
    steps, counts = steps_of(kinds)
    if 4 * steps.size > MAX_STEP_BYTES:
        raise NotImplementedError(
            f"{steps.size} tiles of {M} x {B}; SMEM has room for {MAX_STEP_BYTES // 4}"
        )
    plan = TpuFlashPlan(rule, (M, B), kinds.shape[3], kinds.shape[0] > 1, kinds.shape[1] > 1)
    scalars = TpuFlashScalars(
        jnp.asarray(steps), jnp.asarray(counts), arrays.offsets(R), arrays.lengths(R, S),
        *(x if x is None else x.astype(jnp.float32) for x in (arrays.sinks, arrays.alibi_slopes)),
    )  # fmt: skip
    dtype = jnp.bfloat16 if q.dtype == k.dtype == jnp.bfloat16 else jnp.float32
    operands = [*(x.astype(dtype) for x in (q, k, v)), *(arrays.hidden or (None, None))]
    # Pallas handles a last tile that reaches past its array, but no tile larger than the array.
    pads = [max(M - T, 0), *[max(B - S, 0)] * 2]
    for n, pad in enumerate(pads):
        operands[n] = jnp.pad(operands[n], ((0, 0), (0, pad), (0, 0), (0, 0)))
    if arrays.hidden is not None:
        pad = ((0, 0), (0, 0), (0, max(B - S, 0)))
        operands[3:] = [jnp.pad(x, pad) for x in arrays.hidden]
    out, lse = _call(plan, scalars, operands, counts.max(), interpret)
    return out[:, :T].astype(q.dtype), lse if lse is None else lse[:, :, 0, :T].swapaxes(1, 2)


def _call(plan: TpuFlashPlan, scalars: TpuFlashScalars, operands: list[Any], num_steps, interpret):
    """Run the `pallas_call`: out [R, T', N, H], lse [R, N, 1, T'] or None."""
    q, k, v, start, end = operands
    (R, T, N, H), K, (M, B) = q.shape, k.shape[2], plan.tile
    present = [x for x in (*scalars, start, end) if x is not None]
    missing = [name for name in ("sinks", "slopes") if getattr(scalars, name) is None]
    missing += ["start", "end"] if start is None else []
    missing += [] if plan.rule.return_lse else ["lse"]
    names = [name for name in TpuFlashScalars._fields if name not in missing]
    flat = H % LANES == 0

    def tile_at(row, head, index, *refs):
        s = TpuFlashScalars(
            **{**dict.fromkeys(TpuFlashScalars._fields), **dict(zip(names, refs, strict=True))}
        )
        return plan.tiles(plan.step(s, row, head, index))

    def spec(size: int, axis: int, group: int):
        """Return the spec of a tile of one head, of queries (axis 0) or keys (axis 1)."""
        if flat:
            at = lambda row, head, *rest: (row, tile_at(row, head, *rest)[axis], head // group)
            return pl.BlockSpec((None, size, H), at)
        at = lambda row, head, *rest: (row, head // group, tile_at(row, head, *rest)[axis], 0)
        return pl.BlockSpec((None, None, size, H), at)

    lay = lambda x: x.reshape(*x.shape[:2], -1) if flat else x.swapaxes(1, 2)
    queries_spec, keys_spec = spec(M, 0, 1), spec(B, 1, N // K)
    in_specs, inputs = [queries_spec, keys_spec, keys_spec], [lay(x) for x in (q, k, v)]
    if start is not None:
        at = lambda row, head, *rest: (row, 0, tile_at(row, head, *rest)[1])
        in_specs += [pl.BlockSpec((None, start.shape[1], B), at)] * 2
        inputs += [start, end]
    out_specs, out_shape = [queries_spec], [jax.ShapeDtypeStruct(inputs[0].shape, q.dtype)]
    if plan.rule.return_lse:
        at = lambda row, head, *rest: (row, head, 0, tile_at(row, head, *rest)[0])
        out_specs += [pl.BlockSpec((None, None, 1, M), at)]
        out_shape += [jax.ShapeDtypeStruct((R, N, 1, T), jnp.float32)]
    results = pl.pallas_call(
        partial(kernel, plan, tuple(missing)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(names),
            grid=(R, N, num_steps),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((M, x), jnp.float32) for x in (LANES, LANES, H)],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="flash_attention",
    )(*present[: len(names)], *inputs)
    out = results[0].reshape(q.shape) if flat else results[0].swapaxes(1, 2)
    return out, results[1] if plan.rule.return_lse else None
