"""A warpgroup's operations in the Hopper kernel: products, layouts, loads and stores.

`Wgmma` is what a GPU runs. Pallas' emulator lacks some of it, so `emulated` has plain JAX in its
place; all else (copies, barriers, slots, masks) is the same code there.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 64  # of 2-byte numbers: 128 bytes, what the swizzle takes
TILING = plgpu.TilingTransform((8, LANES))
SWIZZLE = plgpu.SwizzleTransform(2 * LANES)

store: Any = getattr(plgpu, "store", None)  # not in JAX 0.10


class Wgmma:
    """Operations of a warpgroup: matrices as wgmma leaves them, vectors with one number a row."""

    matrix = plgpu.Layout.WGMMA
    vector = plgpu.Layout.WGMMA.reduce(1)

    @staticmethod
    def place(x: jax.Array, layout: Any) -> jax.Array:
        return plgpu.layout_cast(x, layout)

    @staticmethod
    def load_rows(ref: Any, index: jax.Array) -> jax.Array:
        """Return the vector `ref[index]`, in whatever pieces the layout needs: it is read once a
        unit."""
        # Newer JAX takes no index; 0.10 requires one.
        has_index = "idx" in inspect.signature(plgpu.load).parameters
        index_of_all: dict[str, Any] = {"idx": ()} if has_index else {}
        return plgpu.load(ref.at[index], **index_of_all, layout=Wgmma.vector, optimized=False)

    @staticmethod
    def store(ref: Any, x: jax.Array) -> None:
        """Store to shared memory that TMA reads row by row: with bank conflicts, but once a
        unit."""
        if store is None:
            ref[...] = x
        else:  # newer JAX, where plain indexing refuses such conflicts
            store(ref, x, optimized=False)

    @staticmethod
    def iota(shape: tuple[int, ...], dimension: int, layout: Any) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)

    @staticmethod
    def scores(q: Any, k: Any) -> jax.Array:
        """Return q [M, H] times k [S, H], both in shared memory: [M, S]."""

        def multiply(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, q, k.T)
            return accumulator[...]

        return pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((q.shape[0], k.shape[0]), jnp.float32)
        )

    @staticmethod
    def accumulate(sums: jax.Array, weights: jax.Array, v: Any) -> jax.Array:
        """Return sums + weights @ v; `v` [S, H] in shared memory, the others in registers."""

        def multiply(accumulator: Any) -> None:
            plgpu.wgmma(accumulator, weights, v)

        start: Any = plgpu.WGMMAAccumulatorRef.init(sums)
        return pl.run_state(multiply)(start)

    @staticmethod
    def clear_keys(v: Any, first: jax.Array) -> None:
        """Zero the tokens of `v` [S, H], in shared memory, from `first` on."""
        S, H = v.shape
        layout = plgpu.Layout.SMEM_GMEM_COPY((S, LANES), v.dtype, SWIZZLE.swizzle)
        key = plgpu.broadcasted_iota(jnp.int32, (S, LANES), 0, layout=layout)
        # Part by part: all of H = 256 at once does not fit with the sums (260 bytes spilled).
        for lane in range(0, H, LANES):
            part = v.at[:, lane : lane + LANES]
            numbers = Wgmma.place(part[...], layout)
            part[...] = jnp.where(key < first, numbers, jnp.zeros((), v.dtype))


class Emulated(Wgmma):
    """For newer JAX's emulator: it lacks products whose first operand is in registers."""

    @staticmethod
    def accumulate(sums: jax.Array, weights: jax.Array, v: Any) -> jax.Array:
        product = jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
        # A wgmma reads as TMA writes, by the async proxy; this load does not, and the emulator
        # knows the difference.
        plgpu.commit_smem()
        return sums + product


class EmulatedWithoutWgmma:
    """For the emulator of JAX 0.10: it lacks transposed operands and layouts, too."""

    matrix = vector = None

    @staticmethod
    def place(x: jax.Array, layout: Any) -> jax.Array:
        return x

    @staticmethod
    def load_rows(ref: Any, index: jax.Array) -> jax.Array:
        return ref[index]

    @staticmethod
    def store(ref: Any, x: jax.Array) -> None:
        ref[...] = x

    @staticmethod
    def iota(shape: tuple[int, ...], dimension: int, layout: Any) -> jax.Array:
        return jax.lax.broadcasted_iota(jnp.int32, shape, dimension)

    @staticmethod
    def scores(q: Any, k: Any) -> jax.Array:
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    accumulate = staticmethod(Emulated.accumulate)

    @staticmethod
    def clear_keys(v: Any, first: jax.Array) -> None:
        key = jax.lax.broadcasted_iota(jnp.int32, v.shape, 0)
        v[...] = jnp.where(key < first, v[...], jnp.zeros((), v.dtype))


# The emulator that knows wgmma came with `plgpu.store`.
emulated: Any = EmulatedWithoutWgmma if store is None else Emulated
