"""Attention over keys in one array, with arbitrary masks and score changes; see `api.py`."""

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.flash_attention.api import BACKENDS, flash_attention, merge
from jaxinfer.kernels.flash_attention.blocks import block_mask
from jaxinfer.kernels.flash_attention.rule import AttentionMask, BlockMask, ColumnIntervals

__all__ = [
    "BACKENDS",
    "AttentionMask",
    "AttentionVariant",
    "BlockMask",
    "ColumnIntervals",
    "block_mask",
    "flash_attention",
    "merge",
]
