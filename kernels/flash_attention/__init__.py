"""Attention over keys that lie in one array, with masks and scores of one's own; see `api.py`."""

from jaxinfer.kernels.flash_attention.api import BACKENDS, flash_attention, merge
from jaxinfer.kernels.flash_attention.blocks import block_mask
from jaxinfer.kernels.flash_attention.rule import BlockMask, ColumnIntervals

__all__ = ["BACKENDS", "BlockMask", "ColumnIntervals", "block_mask", "flash_attention", "merge"]
