"""The sampling state on the device, with one row per slot, and the functions that write it.

A request occupies a slot from admission until it finishes. On admission `pack_scalars` (numpy, on
the host) and `write_scalars` (traced) set its scalars. Only a request that uses an *extra* (bias,
allowed tokens, bad words, penalties, min_tokens) also uploads `pack_extras`. The rows of an earlier
request are never cleared, because a slot's data is read only if its bit in the flags word is set.

Dimensions: S slots, V vocabulary size, w = ceil(V / 32) words of a bit set over the vocabulary.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxinfer.engine.request import Request
from jaxinfer.sampling.params import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    SamplingParams,
)

ANY_TOKEN = -2  # left padding of a bad word's prefix; matches any earlier token
NO_TOKEN = -1  # in recent_tokens: before the first known token; in a result: none was sampled
NO_BIAS = np.iinfo(np.int32).max  # unused entry of bias_ids; out of range, so the scatter drops it


HostOrDevice: TypeAlias = Any  # np.ndarray of one slot, or jax.Array of all of them


class Feature(enum.IntFlag):
    """The features that a slot uses, as bits of the flags word; greedy decoding sets none."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    BIAS = 8
    ALLOWED = 16
    BAD_WORDS = 32
    MIN_TOKENS = 64
    PENALTIES = 128
    LOGPROBS = 256


EXTRAS = Feature.BIAS | Feature.ALLOWED | Feature.BAD_WORDS | Feature.MIN_TOKENS | Feature.PENALTIES


class FloatColumn(enum.IntEnum):
    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    PRESENCE = 3
    FREQUENCY = 4
    REPETITION = 5


class IntColumn(enum.IntEnum):
    FLAGS = 0
    TOP_K = 1
    SEED = 2  # the bits of a uint32
    MIN_LEN = 3  # the number of known tokens (prompt + min_tokens) that permits stop tokens


NUM_FLOATS = len(FloatColumn)
NUM_INTS = len(IntColumn)


class SlotExtras(NamedTuple):
    """The arrays of all slots; on the host, those of one slot, without the S axis."""

    allowed_bits: HostOrDevice  # [S, w] uint32: allowed_token_ids
    stop_bits: HostOrDevice  # [S, w] uint32: tokens that min_tokens forbids
    prompt_bits: HostOrDevice  # [S, w] uint32: tokens of the prompt
    output_counts: HostOrDevice  # [S, V] int32: how often each token was sampled
    bias_ids: HostOrDevice  # [S, MAX_LOGIT_BIAS] int32, NO_BIAS if unused
    bias_values: HostOrDevice  # [S, MAX_LOGIT_BIAS] float32
    bad_words: HostOrDevice  # [S, MAX_BAD_WORDS, MAX_BAD_WORD_LEN] int32, right-aligned
    recent_tokens: HostOrDevice  # [S, MAX_BAD_WORD_LEN - 1] int32: the last known tokens


class SlotSampling(NamedTuple):
    """The device state of all slots; a pytree that each step donates."""

    floats: jax.Array  # [S, NUM_FLOATS] float32, by FloatColumn
    ints: jax.Array  # [S, NUM_INTS] int32, by IntColumn
    extras: SlotExtras


def init_slots(num_slots: int, vocab_size: int) -> SlotSampling:
    """Return the state in which every slot is greedy; about 4.4 bytes per (slot, token)."""
    empty = _empty_extras(vocab_size)
    spread = lambda row: jnp.broadcast_to(jnp.asarray(row), (num_slots, *row.shape)).copy()
    return SlotSampling(
        floats=jnp.zeros((num_slots, NUM_FLOATS), jnp.float32),
        ints=jnp.zeros((num_slots, NUM_INTS), jnp.int32),
        extras=jax.tree.map(spread, empty),
    )


def _empty_extras(vocab_size: int) -> SlotExtras:
    no_bits = np.zeros(-(-vocab_size // 32), np.uint32)
    return SlotExtras(
        allowed_bits=no_bits,
        stop_bits=no_bits,
        prompt_bits=no_bits,
        output_counts=np.zeros(vocab_size, np.int32),
        bias_ids=np.full(MAX_LOGIT_BIAS, NO_BIAS, np.int32),
        bias_values=np.zeros(MAX_LOGIT_BIAS, np.float32),
        bad_words=np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), ANY_TOKEN, np.int32),
        recent_tokens=np.full(MAX_BAD_WORD_LEN - 1, NO_TOKEN, np.int32),
    )


def features(
    params: SamplingParams,
    *,
    eos_token_ids: Iterable[int] = (),
    bad_word_ids: Sequence[Sequence[int]] = (),
) -> Feature:
    """Return the features that `params` use; `bad_word_ids` are the tokenized `bad_words`."""
    if params.bad_words and not bad_word_ids:
        raise ValueError(f"bad_words={params.bad_words!r} were not tokenized: pass bad_word_ids")
    asked = {
        Feature.RANDOM: not params.is_greedy,
        Feature.TOP_K: not params.is_greedy and params.top_k > 0,
        Feature.TOP_P: not params.is_greedy and params.top_p < 1.0,
        Feature.BIAS: bool(params.logit_bias),
        Feature.ALLOWED: params.allowed_token_ids is not None,
        Feature.BAD_WORDS: bool(bad_word_ids),
        Feature.MIN_TOKENS: params.min_tokens > 0 and bool(_held_back(params, eos_token_ids)),
        Feature.PENALTIES: params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0,
        Feature.LOGPROBS: params.logprobs is not None,
    }
    flags = Feature(0)
    for feature, is_asked in asked.items():
        flags |= feature if is_asked else Feature(0)
    return flags


def _held_back(params: SamplingParams, eos_token_ids: Iterable[int]) -> set[int]:
    """Return the tokens that would end the request; `ignore_eos` excludes end-of-text tokens."""
    return set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))


def pack(
    request: Request, eos_token_ids: Iterable[int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray, SlotExtras | None]:
    """Return the arrays that admission writes for a request (`pack_scalars`, `pack_extras`)."""
    about: dict[str, Any] = {
        "eos_token_ids": eos_token_ids,
        "bad_word_ids": request.sampling.bad_word_ids,
    }
    ints, floats = pack_scalars(
        request.params, seed=request.sampling.seed, prompt_len=request.prompt_len, **about
    )
    extras = pack_extras(
        request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        vocab_size=vocab_size,
        **about,
    )
    return ints, floats, extras


def pack_scalars(
    params: SamplingParams,
    *,
    seed: int,
    prompt_len: int,
    eos_token_ids: Iterable[int] = (),
    bad_word_ids: Sequence[Sequence[int]] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Return the slot's scalars on the host: int32 [NUM_INTS], float32 [NUM_FLOATS].

    `seed` in [0, 2**32) is `params.seed` or, where that is None, the seed that the engine chose.
    `prompt_len` is the length of the original prompt, also when a preempted request is readmitted.
    """
    flags = features(params, eos_token_ids=eos_token_ids, bad_word_ids=bad_word_ids)
    ints = np.zeros(NUM_INTS, np.int32)
    ints[IntColumn.FLAGS] = int(flags)
    ints[IntColumn.TOP_K] = max(params.top_k, 0)
    ints[IntColumn.SEED] = np.uint32(seed).view(np.int32)
    ints[IntColumn.MIN_LEN] = min(prompt_len + params.min_tokens, np.iinfo(np.int32).max)
    floats = np.zeros(NUM_FLOATS, np.float32)
    floats[FloatColumn.TEMPERATURE] = params.temperature
    floats[FloatColumn.TOP_P] = params.top_p
    floats[FloatColumn.MIN_P] = params.min_p
    floats[FloatColumn.PRESENCE] = params.presence_penalty
    floats[FloatColumn.FREQUENCY] = params.frequency_penalty
    floats[FloatColumn.REPETITION] = params.repetition_penalty
    return ints, floats


def pack_extras(
    params: SamplingParams,
    *,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int] = (),
    eos_token_ids: Iterable[int] = (),
    bad_word_ids: Sequence[Sequence[int]] = (),
    vocab_size: int,
) -> SlotExtras | None:
    """Return the slot's extras on the host, or None if the request uses none.

    For a request that is readmitted after a preemption, `output_token_ids` are the tokens that it
    has produced: its counts and recent tokens are rebuilt from them. Raises `ValueError` as
    `SamplingParams.check` does.
    """
    flags = features(params, eos_token_ids=eos_token_ids, bad_word_ids=bad_word_ids)
    if not flags & EXTRAS:
        return None
    params.check(vocab_size, bad_word_ids)
    extras = _empty_extras(vocab_size)
    bias = params.logit_bias or {}
    extras.bias_ids[: len(bias)] = list(bias.keys())
    extras.bias_values[: len(bias)] = list(bias.values())
    for row, word in zip(extras.bad_words, bad_word_ids, strict=False):
        row[-len(word) :] = word
    known = [*prompt_token_ids[-MAX_BAD_WORD_LEN:], *output_token_ids][-(MAX_BAD_WORD_LEN - 1) :]
    if known:
        extras.recent_tokens[-len(known) :] = known
    np.add.at(extras.output_counts, np.asarray(output_token_ids, np.int64), 1)
    return extras._replace(
        allowed_bits=_bit_set(params.allowed_token_ids or (), vocab_size),
        stop_bits=_bit_set(list(_held_back(params, eos_token_ids)), vocab_size),
        prompt_bits=_bit_set(prompt_token_ids, vocab_size),
    )


def _bit_set(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return [w] uint32 in which bit i % 32 of word i // 32 is set for every id i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def write_scalars(
    state: SlotSampling,
    slot: Int32[Array, "*A"],
    ints: Int32[Array, "*A i"],
    floats: Float32[Array, "*A f"],
) -> SlotSampling:
    """Write the scalars of one slot, or of A slots at once; slots >= S are dropped."""
    return state._replace(
        ints=state.ints.at[slot].set(ints, mode="drop"),
        floats=state.floats.at[slot].set(floats, mode="drop"),
    )


def write_extras(state: SlotSampling, slot: Int32[Array, "*A"], extras: SlotExtras) -> SlotSampling:
    """Write the extras of one slot, or of A slots at once; slots >= S are dropped."""
    write = lambda old, new: old.at[slot].set(new, mode="drop")
    return state._replace(extras=jax.tree.map(write, state.extras, extras))


def unpack_bits(words, num_bits: int):
    """Expand bit sets [R, w] uint32 to booleans [R, num_bits]."""
    shifts = jnp.arange(32, dtype=jnp.uint32)
    bits = (words[:, :, None] >> shifts) & jnp.uint32(1)
    return bits.reshape(words.shape[0], -1)[:, :num_bits] != 0
