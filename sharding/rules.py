"""From logical axes to mesh axes: one table, and how arrays lie by it.

A parameter states the meaning of its dimensions (`nn.layers.parameter`); a rule says over which
axes of the mesh a meaning is split. So the weights' layout, their shapes on one device and the sums
that a product over split inputs needs all follow from the parameter alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from jaxinfer.sharding.mesh import STEP_AXES, MeshError, divisors, would_do

# Outermost first. Outside experts, `expert` splits what `tensor` splits: its devices would compute
# the same otherwise. The vocabulary is split over the pipeline too, so that no stage idles while
# the last one's tokens go through the head.
RULES: Mapping[str, tuple[str, ...]] = {
    "vocab": ("pipe", "expert", "tensor"),
    "heads": ("expert", "tensor"),
    "kv_heads": ("expert", "tensor"),
    "ffn": ("expert", "tensor"),
    "experts": ("expert",),
    "expert_ffn": ("tensor",),
    "stage": ("pipe",),
    "cell": ("seq",),  # of a page
    "choices": (),  # of a router
    "model": (),
    "head_dim": (),
    "latent": (),
    "q_latent": (),
    "half": (),
    "position": (),
    "token_type": (),
    "one": (),
}


# What every device may as well hold whole, and compute all of, at the price of memory and time.
CAN_BE_WHOLE = ("vocab", "heads", "kv_heads", "ffn", "experts", "expert_ffn")
ALL_REDUCES = ("exact", "int8")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arrays of one engine lie on its mesh. `whole`: logical axes that are not split,
    whatever the rules say. Without sizes everything is whole, on one device."""

    sizes: tuple[tuple[str, int], ...] = ()  # of mesh axes, outermost first
    whole: frozenset[str] = frozenset()
    # How a product over split inputs is summed (`products.sum_of_products`).
    all_reduce: str = "exact"  # or "int8"
    overlaps: bool = False  # in parts, each on its way while the next one is made
    # A sum's bits do not depend on where in an array it stands: for a batch-invariant model.
    sums_in_order: bool = False

    def __post_init__(self):
        if unknown := sorted(self.whole - set(CAN_BE_WHOLE)):
            raise MeshError(
                f"mesh.whole names {', '.join(unknown)}; it can name {', '.join(CAN_BE_WHOLE)}"
            )
        if self.all_reduce not in ALL_REDUCES:
            raise MeshError(
                f"mesh.all_reduce is {self.all_reduce!r}; there are {', '.join(ALL_REDUCES)}"
            )
        if self.overlaps and self.all_reduce != "exact":
            raise MeshError(
                f"mesh.all_reduce = {self.all_reduce!r} with mesh.overlap = true: a sum that is "
                "made hop by hop beside its product is exact; choose one of the two"
            )
        is_summed = self.size("expert") * self.size("tensor") > 1
        if not is_summed and (self.overlaps or self.all_reduce != "exact"):
            option = "overlap = true" if self.overlaps else f"all_reduce = {self.all_reduce!r}"
            raise MeshError(
                f"mesh.{option} is about the sums over mesh.expert and mesh.tensor, which are both "
                "1: leave it out, or split the layers over one of them"
            )

    @classmethod
    def of(cls, sizes: Mapping[str, int], **options) -> Layout:
        return cls(tuple((axis, sizes.get(axis, 1)) for axis in STEP_AXES), **options)

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.sizes)

    def size(self, axis: str) -> int:
        """Of a mesh axis."""
        return dict(self.sizes).get(axis, 1)

    def axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes, longer than 1, that split a logical axis; `MeshError` for one that the
        table lacks."""
        if logical not in RULES:
            raise MeshError(
                f"no rule for the logical axis {logical!r}; there are {', '.join(sorted(RULES))}"
            )
        if logical in self.whole:
            return ()
        return tuple(axis for axis in RULES[logical] if self.size(axis) > 1)

    def parts(self, logical: str) -> int:
        return math.prod(self.size(axis) for axis in self.axes(logical))

    def local(self, dims: Sequence[int], logical: Sequence[str], what: str = "") -> tuple[int, ...]:
        """The dimensions of one device's part; `MeshError` where one cannot be split evenly."""
        self.check_collisions(logical, what)
        return tuple(self._part(n, axis, what) for n, axis in zip(dims, logical, strict=True))

    def spec(self, logical: Sequence[str]) -> PartitionSpec:
        """Of an array with these dimensions."""
        self.check_collisions(logical)
        return PartitionSpec(*(self.axes(axis) or None for axis in logical))

    def check_collisions(self, logical: Iterable[str], what: str = "") -> None:
        """`MeshError` where two dimensions of one array would be split over the same mesh axis."""
        used: dict[str, str] = {}
        for name in logical:
            for axis in self.axes(name):
                if axis in used:
                    raise MeshError(
                        f"{what or 'an array'} is split over {axis} twice, by {used[axis]} and by "
                        f"{name}: keep one whole (mesh.whole)"
                    )
                used[axis] = name

    def _part(self, n: int, logical: str, what: str) -> int:
        parts = self.parts(logical)
        if n % parts:
            axes = " x ".join(f"{axis} {self.size(axis)}" for axis in self.axes(logical))
            whole = ["heads", "kv_heads"] if logical in ("heads", "kv_heads") else [logical]
            raise MeshError(
                f"{what + ': ' if what else ''}{logical} is {n}, which {axes} does not divide; "
                f"{would_do(divisors(n))}; or keep it whole (mesh.whole = {whole})"
            )
        return n // parts


ONE_DEVICE = Layout()
