"""From a plan to what the device gets: one packed int32 buffer for each step. numpy only.

The buffer has the ragged layout, the token ids that the device does not know yet, and the changes
of page tables: O(tokens) bytes, never rows x table width (256 rows of 32k tokens in 16-token pages
would be 2 MB of table in every step).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import Plan, Row

ON_DEVICE = -1  # as a token id: the last token that the slot sampled


class StepShape(NamedTuple):
    """The static sizes of a step: a bucket of T tokens, its rows, its changed table entries."""

    num_tokens: int  # T
    num_rows: int  # R: a row has at least one token
    num_entries: int  # a row of n tokens takes at most 1 + (n - 1) // B new pages

    @classmethod
    def of_bucket(cls, num_tokens: int, max_num_seqs: int, page_size: int) -> StepShape:
        """The shape of the step that is compiled for a bucket."""
        num_rows = min(num_tokens, max_num_seqs)
        return cls(num_tokens, num_rows, num_rows + num_tokens // page_size)


class StepInputs(NamedTuple):
    """The sections of the packed buffer: numpy on the host, traced arrays in the step."""

    token_ids: Any  # [T], or ON_DEVICE
    target_ids: Any  # [T] the token that follows, for prompt log-probabilities
    q_start: Any  # [R+1]
    kv_len: Any  # [R]
    row_slot: Any  # [R]
    is_sampled: Any  # [R]
    write_from: Any  # [R] positions before it are in shared pages already
    min_rope_len: Any  # [R] the least sequence length that RoPE scalings use (nn/rope.py)
    entry_slot: Any  # [entries]; a value past the last slot marks no entry
    entry_index: Any  # [entries]
    entry_page: Any  # [entries]
    wants_prompt_logprobs: Any  # [1]


def _sizes(shape: StepShape) -> StepInputs:
    T, R, entries = shape
    return StepInputs(T, T, R + 1, R, R, R, R, R, entries, entries, entries, 1)  # type: ignore[arg-type]


def packed_size(shape: StepShape) -> int:
    """Integers in the buffer."""
    return sum(_sizes(shape))  # type: ignore[arg-type]


def unpack(packed, shape: StepShape) -> StepInputs:
    """Views of the buffer's sections; works on numpy and on traced arrays."""
    sections, at = [], 0
    for size in _sizes(shape):
        sections.append(packed[at : at + size])
        at += size
    return StepInputs(*sections)


def build(plan: Plan, shape: StepShape, num_slots: int) -> np.ndarray:
    """Pack a plan, whose rows and tokens must fit `shape`, into one int32 buffer.

    A plan without rows is a tick in which nothing enters a pipeline.
    """
    packed = np.zeros(packed_size(shape), np.int32)
    inputs = unpack(packed, shape)
    rows, num_rows = plan.rows, len(plan.rows)
    assert num_rows <= shape.num_rows and len(plan.entries) <= shape.num_entries
    inputs.entry_slot[:] = num_slots
    if not rows:
        return packed

    requests, slots, starts, num_tokens, is_sampled, min_rope_len = zip(*rows, strict=True)
    inputs.row_slot[:num_rows] = slots
    inputs.is_sampled[:num_rows] = is_sampled
    inputs.write_from[:num_rows] = [request.prefix.shared_len for request in requests]
    inputs.min_rope_len[:num_rows] = min_rope_len
    inputs.kv_len[:num_rows] = starts
    inputs.kv_len[:num_rows] += np.asarray(num_tokens, np.int32)
    np.cumsum(num_tokens, out=inputs.q_start[1 : num_rows + 1])
    inputs.q_start[num_rows + 1 :] = inputs.q_start[num_rows]

    num_decodes = num_tokens.count(1)  # they come first
    decodes = zip(requests[:num_decodes], starts, strict=False)
    inputs.token_ids[:num_decodes] = [request.token_id(at, ON_DEVICE) for request, at in decodes]
    for i in range(num_decodes, num_rows):
        row, at = rows[i], inputs.q_start[i]
        ids = row.request.token_ids(row.start, row.start + row.num_tokens)
        inputs.token_ids[at : at + len(ids)] = ids
        inputs.token_ids[at + len(ids) : at + row.num_tokens] = ON_DEVICE

    if plan.entries:
        entries = np.asarray(plan.entries, np.int32).T
        for section, values in zip(
            (inputs.entry_slot, inputs.entry_index, inputs.entry_page), entries, strict=True
        ):
            section[: len(plan.entries)] = values

    scored = [i for i, r in enumerate(requests) if r.params.prompt_logprobs is not None]
    if scored:
        inputs.wants_prompt_logprobs[0] = 1
        for i in scored:
            targets = _targets(rows[i].request, rows[i])
            inputs.target_ids[inputs.q_start[i] : inputs.q_start[i] + len(targets)] = targets
    return packed


def _targets(request: Request, row: Row) -> list[int]:
    """The prompt tokens that follow the row's tokens; shorter where the prompt ends."""
    return request.prompt_token_ids[row.start + 1 : row.start + 1 + row.num_tokens]
