"""A harness for the sampling step: one slot and one row per request, with NaN in padding rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.sample import sample
from jaxinfer.sampling.slots import (
    NO_TOKEN,
    init_slots,
    pack_extras,
    pack_scalars,
    write_extras,
    write_scalars,
)

V, R = 300, 8  # V is not a multiple of 32 or 128
EOS = 2
PROMPT = [5, 6, 7, 7]
KEY = jax.random.key(0)

STEP = jax.jit(sample, static_argnames="row_tile")  # compiled once per shape
WRITE = jax.jit(write_scalars)
WRITE_EXTRAS = jax.jit(write_extras)


class Batch:
    """Requests in the first slots, one row each; other slots and rows are padding."""

    def __init__(self, *requests: SamplingParams, vocab_size=V, num_slots=R, bad_word_ids=()):
        self.state, self.vocab_size = init_slots(num_slots, vocab_size), vocab_size
        self.bad_word_ids = bad_word_ids
        self.outputs = [[] for _ in requests]
        for slot, params in enumerate(requests):
            self.admit(slot, params)

    def admit(self, slot, params: SamplingParams, outputs=()):
        """Admit a request to a slot; with outputs, after a preemption."""
        options: dict[str, Any] = dict(eos_token_ids=[EOS])
        if params.bad_words:
            options["bad_word_ids"] = self.bad_word_ids
        ints, floats = pack_scalars(params, seed=slot + 10, prompt_len=len(PROMPT), **options)
        where = jnp.int32(slot)
        self.state = WRITE(self.state, where, jnp.asarray(ints), jnp.asarray(floats))
        extras = pack_extras(
            params,
            prompt_token_ids=PROMPT,
            output_token_ids=outputs,
            vocab_size=self.vocab_size,
            **options,
        )
        if extras is not None:
            self.state = WRITE_EXTRAS(self.state, where, jax.tree.map(jnp.asarray, extras))

    def step(self, logits, slots=None, num_rows=R, **options):
        """Sample one token for each of `slots` from its row of logits; padding rows are NaN."""
        slots = list(range(len(self.outputs)) if slots is None else slots)
        rows = np.full((num_rows, self.vocab_size), np.nan, np.float32)
        rows[: len(slots)] = logits
        row_slot, position = np.zeros((2, num_rows), np.int32)
        row_slot[: len(slots)] = slots
        position[: len(slots)] = [len(PROMPT) + len(self.outputs[slot]) for slot in slots]
        is_sampled = jnp.arange(num_rows) < len(slots)
        arrays = map(jnp.asarray, (row_slot, position))
        output, self.state = STEP(
            jnp.asarray(rows), self.state, *arrays, is_sampled, KEY, **options
        )
        assert np.all(np.asarray(output.tokens)[len(slots) :] == NO_TOKEN)
        for slot, token in zip(slots, np.asarray(output.tokens).tolist(), strict=False):
            self.outputs[slot].append(token)
        return output

    def chosen(self, logits, **options) -> list[int]:
        return np.asarray(self.step(logits, **options).tokens)[: len(self.outputs)].tolist()


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


def ranked(*tokens, vocab_size=V):
    """Return logits [1, V] whose likeliest tokens are `tokens`, in this order."""
    logits = np.zeros((1, vocab_size), np.float32)
    logits[0, list(tokens)] = np.arange(len(tokens), 0, -1)
    return logits
