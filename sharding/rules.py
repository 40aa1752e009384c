"""Sharding rules: one table from logical axes to mesh axes, and the layouts that follow from it.

A parameter names the logical axis of each of its dimensions (`nn.layers.parameter`); a rule maps a
logical axis to the mesh axes that shard it. The sharding of the weights, their shapes on one device
and the all-reduce after a product with sharded inputs all follow from the parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from jaxinfer.sharding.mesh import STEP_AXES, MeshError, divisors, suggest_sizes

# Mesh axes, outermost first. Outside the experts, `expert` shards the same axes as `tensor`:
# otherwise its devices would all compute the same. The vocabulary is sharded over the pipeline too,
# so that no stage idles while the last stage's tokens go through the output head.
RULES: Mapping[str, tuple[str, ...]] = {
    "vocab": ("pipe", "expert", "tensor"),
    "heads": ("expert", "tensor"),
    "kv_heads": ("expert", "tensor"),
    "ffn": ("expert", "tensor"),
    "experts": ("expert",),
    "expert_ffn": ("tensor",),
    "stage": ("pipe",),
    "page_offset": ("seq",),  # the tokens of one page
    "choices": (),  # the outputs of a router
    "model": (),
    "head_dim": (),
    "latent": (),
    "q_latent": (),
    "half": (),
    "position": (),
    "token_type": (),
    "one": (),
}


# The logical axes that may be replicated instead, at the cost of memory and time.
CAN_BE_WHOLE = ("vocab", "heads", "kv_heads", "ffn", "experts", "expert_ffn")
ALL_REDUCES = ("exact", "int8")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of one engine's arrays over its mesh; without sizes, a single device.

    Raises `MeshError` for options that do not exist or do not go together.
    """

    sizes: tuple[tuple[str, int], ...] = ()  # (mesh axis, size), outermost first
    whole: frozenset[str] = frozenset()  # logical axes to replicate, whatever the rules say
    # How the product of sharded inputs is summed (`products.sum_of_products`).
    all_reduce: str = "exact"  # or "int8"
    overlaps: bool = False  # in parts: one is sent while the next is computed
    # The bits of a sum do not depend on its position in an array (batch-invariant models).
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
                f"mesh.all_reduce = {self.all_reduce!r} with mesh.overlap = true: overlapped sums "
                "are exact; choose one of the two"
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
        """Return the size of a mesh axis; 1 for one that the mesh lacks."""
        return dict(self.sizes).get(axis, 1)

    def axes(self, logical: str) -> tuple[str, ...]:
        """Return the mesh axes longer than 1 that shard a logical axis.

        Raises `MeshError` for a logical axis without a rule.
        """
        if logical not in RULES:
            raise MeshError(
                f"no rule for the logical axis {logical!r}; there are {', '.join(sorted(RULES))}"
            )
        if logical in self.whole:
            return ()
        return tuple(axis for axis in RULES[logical] if self.size(axis) > 1)

    def parts(self, logical: str) -> int:
        """Return the number of shards of a logical axis."""
        return math.prod(self.size(axis) for axis in self.axes(logical))

    def local(self, dims: Sequence[int], logical: Sequence[str], what: str = "") -> tuple[int, ...]:
        """Return the dimensions of one device's shard of an array.

        `what` names the array in a `MeshError`, raised if a dimension cannot be split evenly.
        """
        self.check_collisions(logical, what)
        return tuple(self._part(n, axis, what) for n, axis in zip(dims, logical, strict=True))

    def spec(self, logical: Sequence[str]) -> PartitionSpec:
        """Return the partition spec of an array with these logical axes."""
        self.check_collisions(logical)
        return PartitionSpec(*(self.axes(axis) or None for axis in logical))

    def check_collisions(self, logical: Iterable[str], what: str = "") -> None:
        """Raise `MeshError` if two dimensions of one array would be split over one mesh axis."""
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
                f"{suggest_sizes(divisors(n))}; or keep it whole (mesh.whole = {whole})"
            )
        return n // parts


ONE_DEVICE = Layout()
