"""Hugging Face transformers on PyTorch, in its fastest form on a CPU: the benchmarks' peer.

Nothing here imports jax, so the peer can be timed with or without it. The decode loop is written by
hand over `model.forward` with a `DynamicCache`: it does the same forward passes as `model.generate`
without its per-token bookkeeping, and `TransformersPeer.generate_with_library` times the library's
own loop, so that a run can show which is the faster. Attention is PyTorch's fused kernel (sdpa).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from jaxinfer.tools.bench.report import TimedRun


def load_peer(model: str | Path, dtype: str, attention: str = "sdpa") -> tuple[Any, Any]:
    """Load a Hugging Face directory or a GGUF file; return (model, tokenizer), in eval mode.

    A GGUF file is dequantized to `dtype` by transformers itself, so both sides start from one file.
    """
    path = Path(model)
    where, extra = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    transformers.utils.logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(
        where, dtype=getattr(torch, dtype), attn_implementation=attention, **extra
    )
    return loaded.eval(), AutoTokenizer.from_pretrained(where, **extra)


def cache_name(model: Any) -> str:
    """The name of the key-value cache in `forward` and its output; transformers 5 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class TransformersPeer:
    """Greedy generation with transformers: one padded batch at a time, key-value cache on."""

    def __init__(self, model: str | Path, dtype: str, threads: int):
        torch.set_num_threads(threads)
        self.model, self.tokenizer = load_peer(model, dtype)
        self.pad_id = self.model.config.pad_token_id or 0
        self._cache_name = cache_name(self.model)

    @staticmethod
    def versions() -> dict[str, str]:
        """Versions of the packages that decide the peer's speed."""
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Left-pad to one width: token ids and a 0/1 mask, both [rows, longest prompt]."""
        width = max(len(prompt) for prompt in prompts)
        pad = [width - len(prompt) for prompt in prompts]
        ids = torch.tensor([[self.pad_id] * n + list(p) for n, p in zip(pad, prompts, strict=True)])
        return ids, torch.tensor([[0] * n + [1] * (width - n) for n in pad])

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> TimedRun:
        """Decode `num_tokens` greedy tokens for every prompt in one left-padded batch.

        A batch without padding passes no mask, which lets sdpa take its fastest path.
        """
        ids, mask = self._pad(prompts)
        padded = not bool(mask.all())
        if padded:  # room for the whole answer, so that a step takes a view instead of growing it
            mask = torch.cat([mask, mask.new_ones(len(prompts), num_tokens)], dim=1)
        positions = (mask[:, : ids.shape[1]].cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        chosen, marks, width = [], [time.perf_counter()], ids.shape[1]
        for _ in range(num_tokens):
            logits = self.model(
                input_ids=ids,
                attention_mask=mask[:, :width] if padded else None,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: cache},
            ).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            chosen.append(ids)
            positions = positions[:, -1:] + 1
            width += 1
            if len(marks) == 1:
                marks.append(time.perf_counter())
        end = time.perf_counter()
        return TimedRun(torch.cat(chosen, 1).tolist(), marks[1] - marks[0], end - marks[1])

    @torch.inference_mode()
    def generate_with_library(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds for the same work by `model.generate`, prefill included."""
        ids, mask = self._pad(prompts)
        start = time.perf_counter()
        self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=self.pad_id,
        )
        return time.perf_counter() - start

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds to compute one prompt and its first token."""
        return self.generate([prompt], 1).total_s

    def serve_static(
        self, prompts: Sequence[Sequence[int]], output_lens: Sequence[int], batch_size: int
    ) -> float:
        """Seconds to answer all requests in arrival order, `batch_size` at a time.

        A batch runs until its longest answer is complete, as static batching must; rows that were
        done earlier keep being computed and their extra tokens are thrown away.
        """
        start = time.perf_counter()
        for first in range(0, len(prompts), batch_size):
            rows = slice(first, first + batch_size)
            self.generate(prompts[rows], max(output_lens[rows]))
        return time.perf_counter() - start
