"""The mesh that a configuration asks for: its layout, and whether devices and processes fit it."""

from __future__ import annotations

import math

import jax

from jaxinfer.config import EngineConfig, MeshConfig
from jaxinfer.options import ConfigError
from jaxinfer.parallel.hosts.peers import Peers
from jaxinfer.sharding.mesh import MeshError, format_mesh
from jaxinfer.sharding.products import min_overlapped_tokens
from jaxinfer.sharding.rules import ONE_DEVICE, Layout


def layout_of(mesh: MeshConfig) -> Layout:
    """The layout of one replica. Raises `MeshError` for options that exclude each other, even where
    there is nothing to split."""
    layout = Layout.of(
        mesh.sizes,
        whole=frozenset(mesh.whole),
        all_reduce=mesh.all_reduce,
        overlaps=mesh.overlap,
    )
    return ONE_DEVICE if layout.num_devices == 1 else layout


def page_part_size(page_size: int, layout: Layout) -> int:
    """The tokens of each page that one device stores: all of them, unless sequences are split.

    Raises `ConfigError` where the parts of a sequence do not divide a page.
    """
    parts = layout.parts("page_offset")
    if page_size % parts:
        raise ConfigError(
            f"cache.page_size is {page_size}, which mesh.seq {parts} does not divide: every device "
            f"stores an equal part of each page; use a multiple of {parts}"
        )
    return page_size // parts


def check_processes(config: EngineConfig, peers: Peers) -> None:
    """Raise `ConfigError` if the mesh leaves a process out, or has replicas over processes."""
    num_processes, mesh = peers.num_processes, config.mesh
    if num_processes == 1:
        return
    num_devices = jax.device_count()
    if mesh.data > 1:
        raise ConfigError(
            f"mesh.data is {mesh.data}, over {num_processes} processes: replicas belong to one "
            "process. Run one server for each, on hosts of its own, behind a load balancer"
        )
    if mesh.num_devices != num_devices:
        sizes = format_mesh(mesh.sizes)
        raise ConfigError(
            f"the mesh has {mesh.num_devices} devices ({sizes or 'every axis 1'}), but the "
            f"{num_processes} processes have {num_devices} together: set mesh.tensor, mesh.expert, "
            f"mesh.pipe and mesh.seq so that their product is {num_devices}"
        )


def check_overlap(config: EngineConfig, layout: Layout) -> None:
    """Raise `MeshError` if `mesh.overlap` is set and even the largest step has nothing to
    overlap."""
    largest, n = config.buckets[-1], layout.parts("ffn")
    is_array = config.quantize is None
    least = min_overlapped_tokens(n, is_array=is_array, in_order=config.batch_invariant)
    if not layout.overlaps or largest >= least:
        return
    which = "on a GPU" if is_array else f"of {config.quantize} weights"
    how, way = (
        f"only in steps of {least:g} tokens",
        f"set scheduler.max_num_batched_tokens to {least:g}",
    )
    if least == math.inf:
        how, way = "never with batch_invariant", "leave that out"
    raise MeshError(
        f"mesh.overlap is true, but products {which} are made in parts {how} over {n} devices, and "
        f"the largest step has {largest}: {way}, or leave mesh.overlap out"
    )
