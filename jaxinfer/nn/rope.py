"""Rotary position embedding (RoFormer, arXiv:2104.09864) and its context-extending scalings.

RoPE rotates a pair (x[i], x[i + dim/2]) by the angle `position * frequency[i]`, where
`frequency[i] = theta ** (-2i / dim)` is modified by a scaling. Two scalings also depend on the
length of the sequence. A token's *rope length* is `max(prompt length, position + 1)`, which is the
length that Hugging Face's `generate` has seen when it first computes that token. A family may
recompute a whole sequence when it passes the original length (Phi 3, `Family.restarts_at_limit`);
then all of its tokens have at least that rope length. A token's angles therefore depend only on its
request, never on how the prompt was split into chunks.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.nn.checks import positive_errors


def base_frequencies(theta: float, dim: int) -> np.ndarray:
    """Return `theta ** (-2i/dim)` for i < dim/2, float32 [dim/2]."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (1.0 / np.float32(theta) ** exponent).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Unscaled:
    """Plain RoPE. The other scalings derive from it and change `frequencies` or the factor."""

    attention_factor: float = dataclasses.field(default=1.0, kw_only=True)

    @property
    def length_limit(self) -> int | None:
        """The rope length up to which the frequencies are constant; None: they always are."""
        return None

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        """Return the frequencies [dim/2], float32, for rope lengths up to `length_limit`."""
        return base_frequencies(theta, dim)

    def frequencies_beyond(self, theta: float, dim: int, rope_len: jax.Array) -> jax.Array:
        """Return frequencies [T, dim/2], float32, for rope lengths [T] above `length_limit`."""
        raise AssertionError(f"{type(self).__name__} does not depend on the rope length")


@dataclasses.dataclass(frozen=True)
class LinearScaling(Unscaled):
    """Position interpolation: every frequency divided by `factor` (arXiv:2306.15595)."""

    factor: float

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        return base_frequencies(theta, dim) / np.float32(self.factor)


@dataclasses.dataclass(frozen=True)
class Divided(Unscaled):
    """Frequency i divided by `factors[i]`: how GGUF files store Llama 3's scaling."""

    factors: tuple[float, ...]

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        return base_frequencies(theta, dim) / np.asarray(self.factors, np.float32)


@dataclasses.dataclass(frozen=True)
class Proportional(Unscaled):
    """The first `share` of the frequencies divided by `factor`; the other pairs are not rotated."""

    factor: float
    share: float

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        frequency = base_frequencies(theta, dim) / np.float32(self.factor)
        num_rotated = int(self.share * dim // 2)
        return np.where(np.arange(dim // 2) < num_rotated, frequency, 0).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Llama3(Unscaled):
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: int

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        frequency = base_frequencies(theta, dim)
        rotations = self.original_len * frequency / (2 * math.pi)  # over the original context
        ramp = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ramp = np.clip(ramp, 0, 1)
        return ((1 - ramp) * frequency / self.factor + ramp * frequency).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Yarn(Unscaled):
    """YaRN (arXiv:2309.00071): interpolate slow frequencies, keep fast ones, ramp by dimension."""

    factor: float
    original_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        def dimension(num_rotations: float) -> float:  # the dimension with this number of rotations
            span = self.original_len / (num_rotations * 2 * math.pi)
            return dim * math.log(span) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        frequency = base_frequencies(theta, dim)
        return (frequency / self.factor * ramp + frequency * (1 - ramp)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class DynamicNtk(Unscaled):
    """Dynamic NTK: theta grows with the rope length once it passes `original_len`."""

    factor: float
    original_len: int

    @property
    def length_limit(self) -> int:
        return self.original_len

    def frequencies_beyond(self, theta: float, dim: int, rope_len: jax.Array) -> jax.Array:
        growth = self.factor * rope_len / self.original_len - (self.factor - 1)
        grown = theta * growth ** (dim / (dim - 2))  # [T]
        return 1.0 / grown[:, None] ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


@dataclasses.dataclass(frozen=True)
class LongRope(Unscaled):
    """LongRoPE (arXiv:2402.13753): a divisor for each frequency, others past `original_len`."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_len: int

    @property
    def length_limit(self) -> int:
        return self.original_len

    def frequencies(self, theta: float, dim: int) -> np.ndarray:
        return base_frequencies(theta, dim) / np.asarray(self.short_factor, np.float32)

    def frequencies_beyond(self, theta: float, dim: int, rope_len: jax.Array) -> jax.Array:
        frequency = base_frequencies(theta, dim) / np.asarray(self.long_factor, np.float32)
        return jnp.broadcast_to(frequency, (rope_len.shape[0], dim // 2))


@dataclasses.dataclass(frozen=True)
class Rope:
    """A model's RoPE: `theta`, the number of head dimensions it rotates, and the scaling."""

    theta: float
    dim: int
    scaling: Unscaled = Unscaled()

    def __post_init__(self):
        """Raise `ValueError` for numbers that angles cannot be computed from."""
        fields = dataclasses.fields(self.scaling)
        numbers = {"theta": self.theta} | {f.name: getattr(self.scaling, f.name) for f in fields}
        for name, value in numbers.items():
            if name == "truncate":
                if not isinstance(value, bool):
                    raise ValueError(f"RoPE's truncate is {value!r}; it must be true or false")
                continue
            values = value if isinstance(value, tuple) else (value,)
            if isinstance(value, tuple) and len(value) != self.dim // 2:
                raise ValueError(
                    f"RoPE's {name} has {len(value)} numbers; it needs {self.dim // 2}"
                )
            if positive_errors({str(i): v for i, v in enumerate(values)}):
                raise ValueError(f"RoPE's {name} is {value!r}; it must be above 0 and finite")
        scaling = self.scaling
        if isinstance(scaling, Llama3) and scaling.low_freq_factor >= scaling.high_freq_factor:
            raise ValueError(
                f"RoPE's low_freq_factor is {scaling.low_freq_factor}; it must be below "
                f"high_freq_factor ({scaling.high_freq_factor})"
            )
        if isinstance(scaling, DynamicNtk) and self.dim <= 2:
            raise ValueError(
                f"RoPE rotates {self.dim} dimensions; dynamic scaling needs more than 2"
            )

    def angles(
        self, positions: Int[Array, " T"], rope_len: Int[Array, " T"]
    ) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
        """Return cosine and sine of each token's angles, float32, times the attention factor."""
        frequency = jnp.asarray(self.scaling.frequencies(self.theta, self.dim))
        limit = self.scaling.length_limit
        if limit is not None:
            beyond = self.scaling.frequencies_beyond(self.theta, self.dim, rope_len)
            frequency = jnp.where(rope_len[:, None] > limit, beyond, frequency)
        angle = positions[:, None].astype(jnp.float32) * frequency
        factor = self.scaling.attention_factor
        return jnp.cos(angle) * factor, jnp.sin(angle) * factor
