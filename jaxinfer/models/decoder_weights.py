"""Where the two formats store a decoder's parameters: rows that the families' weight tables share.

The first row that matches a path is used, so a family puts its own rows before these.
"""

from __future__ import annotations

from jaxinfer.models.family import (
    BIAS_PAIRED,
    LINEAR,
    LINEAR_FROM_HEADS,
    LINEAR_PAIRED,
    RESHAPED,
    Weight,
)

HF_ROWS: tuple[Weight, ...] = (
    Weight(r"embed\.weight", "model.embed_tokens.weight"),
    Weight(r"norm\.weight", "model.norm.weight"),
    Weight(r"head\.weight", "lm_head.weight", LINEAR),
    Weight(r"blocks\.(\d+)\.attention_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    Weight(r"blocks\.(\d+)\.mlp_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    Weight(
        r"blocks\.(\d+)\.attention_post_norm\.weight",
        r"model.layers.\1.post_attention_layernorm.weight",
    ),
    Weight(
        r"blocks\.(\d+)\.mlp_post_norm\.weight",
        r"model.layers.\1.post_feedforward_layernorm.weight",
    ),
    Weight(
        r"blocks\.(\d+)\.attention\.([qk])_norm\.weight",
        r"model.layers.\1.self_attn.\2_norm.weight",
    ),
    Weight(
        r"blocks\.(\d+)\.attention\.([qkv])\.weight",
        r"model.layers.\1.self_attn.\2_proj.weight",
        LINEAR,
    ),
    Weight(
        r"blocks\.(\d+)\.attention\.([qkv])\.bias",
        r"model.layers.\1.self_attn.\2_proj.bias",
        RESHAPED,
    ),
    Weight(
        r"blocks\.(\d+)\.attention\.o\.weight",
        r"model.layers.\1.self_attn.o_proj.weight",
        LINEAR_FROM_HEADS,
    ),
    Weight(r"blocks\.(\d+)\.attention\.o\.bias", r"model.layers.\1.self_attn.o_proj.bias"),
    Weight(
        r"blocks\.(\d+)\.mlp\.gate_up",
        (r"model.layers.\1.mlp.gate_proj.weight", r"model.layers.\1.mlp.up_proj.weight"),
        LINEAR,
    ),
    Weight(
        r"blocks\.(\d+)\.mlp\.gate_up_bias",
        (r"model.layers.\1.mlp.gate_proj.bias", r"model.layers.\1.mlp.up_proj.bias"),
    ),
    Weight(r"blocks\.(\d+)\.mlp\.down\.weight", r"model.layers.\1.mlp.down_proj.weight", LINEAR),
    Weight(r"blocks\.(\d+)\.mlp\.down\.bias", r"model.layers.\1.mlp.down_proj.bias"),
)
# Old checkpoints store RoPE's frequencies, and tied ones sometimes the head; neither is needed.
HF_IGNORED = (r".*rotary_emb\.inv_freq", r"lm_head\.weight")
# Models with images store the text decoder under a prefix (of transformers 4, and of 5).
HF_WRAPPED = (
    (r"language_model\.((?:model|lm_head)\..*)", r"\1"),
    (r"model\.language_model\.(.*)", r"model.\1"),
)
HF_IMAGES = (r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..*",)

GGUF_ROWS: tuple[Weight, ...] = (
    Weight(r"embed\.weight", "token_embd.weight"),
    Weight(r"norm\.weight", "output_norm.weight"),
    Weight(r"head\.weight", "output.weight", LINEAR),
    Weight(r"blocks\.(\d+)\.attention_norm\.weight", r"blk.\1.attn_norm.weight"),
    Weight(r"blocks\.(\d+)\.mlp_norm\.weight", r"blk.\1.ffn_norm.weight"),
    Weight(r"blocks\.(\d+)\.attention_post_norm\.weight", r"blk.\1.post_attention_norm.weight"),
    Weight(r"blocks\.(\d+)\.mlp_post_norm\.weight", r"blk.\1.post_ffw_norm.weight"),
    Weight(r"blocks\.(\d+)\.attention\.([qk])_norm\.weight", r"blk.\1.attn_\2_norm.weight"),
    Weight(r"blocks\.(\d+)\.attention\.([qk])\.weight", r"blk.\1.attn_\2.weight", LINEAR_PAIRED),
    Weight(r"blocks\.(\d+)\.attention\.v\.weight", r"blk.\1.attn_v.weight", LINEAR),
    Weight(r"blocks\.(\d+)\.attention\.([qk])\.bias", r"blk.\1.attn_\2.bias", BIAS_PAIRED),
    Weight(r"blocks\.(\d+)\.attention\.v\.bias", r"blk.\1.attn_v.bias", RESHAPED),
    Weight(r"blocks\.(\d+)\.attention\.o\.weight", r"blk.\1.attn_output.weight", LINEAR_FROM_HEADS),
    Weight(r"blocks\.(\d+)\.attention\.o\.bias", r"blk.\1.attn_output.bias"),
    Weight(
        r"blocks\.(\d+)\.mlp\.gate_up",
        (r"blk.\1.ffn_gate.weight", r"blk.\1.ffn_up.weight"),
        LINEAR,
    ),
    Weight(r"blocks\.(\d+)\.mlp\.gate_up_bias", (r"blk.\1.ffn_gate.bias", r"blk.\1.ffn_up.bias")),
    Weight(r"blocks\.(\d+)\.mlp\.down\.weight", r"blk.\1.ffn_down.weight", LINEAR),
    Weight(r"blocks\.(\d+)\.mlp\.down\.bias", r"blk.\1.ffn_down.bias"),
)
# For architectures in which llama.cpp rotates halves, as here: q and k are not reordered.
GGUF_HALVES_ROWS: tuple[Weight, ...] = (
    Weight(r"blocks\.(\d+)\.attention\.([qk])\.weight", r"blk.\1.attn_\2.weight", LINEAR),
    Weight(r"blocks\.(\d+)\.attention\.([qk])\.bias", r"blk.\1.attn_\2.bias", RESHAPED),
    *GGUF_ROWS,
)
GGUF_IGNORED = (r"rope_freqs\.weight",)
