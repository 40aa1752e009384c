"""The packed buffer of a step: what goes in comes out, and every plan fits its bucket."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import EngineConfig, from_mapping
from jaxinfer.engine.pages import PagePool, root_key
from jaxinfer.engine.policies import POLICIES
from jaxinfer.engine.request import FinishReason, Rank, Request
from jaxinfer.engine.scheduler import PageEntry, Plan, Row, Scheduler
from jaxinfer.execution.batch import ON_DEVICE, StepInputs, StepShape, build, packed_size, unpack
from jaxinfer.execution.kv_cache import allocate, page_bytes
from jaxinfer.nn.ragged import CacheShape, StepRows, ragged_batch
from jaxinfer.sampling.params import SamplingParams

NUM_SLOTS = 8


def make_request(prompt: Sequence[int], output: Sequence[int] = (), **fields) -> Request:
    prompt_logprobs = fields.pop("prompt_logprobs", None)
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    request = Request("r", prompt, params, max_len=100)
    request.output_token_ids = list(output)
    request.known_len = request.read_len + fields.pop("num_pending", 0)
    request.prefix.shared_len = fields.pop("num_shared", 0)
    assert not fields
    return request


def row(request: Request, start: int, num_tokens: int, slot: int = 0, is_sampled=False) -> Row:
    return Row(request, slot, start, num_tokens, is_sampled, request.prompt_len)


def built(
    rows: list[Row],
    entries: Sequence[PageEntry] = (),
    *,
    bucket=16,
    page_size=4,
    max_num_seqs=NUM_SLOTS,
) -> StepInputs:
    shape = StepShape.of_bucket(bucket, max_num_seqs, page_size)
    packed = build(Plan(rows, [], list(entries), []), shape, NUM_SLOTS)
    assert packed.dtype == np.int32 and packed.shape == (packed_size(shape),)
    return unpack(packed, shape)


def test_sections_lie_one_behind_the_other_and_fill_the_buffer():
    shape = StepShape(num_tokens=5, num_rows=3, num_entries=4)
    inputs = unpack(np.arange(packed_size(shape)), shape)
    assert np.concatenate(inputs).tolist() == list(range(packed_size(shape)))
    sizes = {name: len(section) for name, section in inputs._asdict().items()}
    assert sizes["token_ids"] == sizes["target_ids"] == 5
    assert sizes["q_start"] == 4 and sizes["wants_prompt_logprobs"] == 1
    assert all(sizes[name] == 3 for name in ("kv_len", "row_slot", "is_sampled", "write_from"))
    assert all(sizes[name] == 4 for name in ("entry_slot", "entry_index", "entry_page"))


def test_numpy_and_jax_unpack_alike():
    shape = StepShape(7, 2, 3)
    packed = np.random.default_rng(0).integers(0, 99, packed_size(shape)).astype(np.int32)
    for ours, theirs in zip(unpack(packed, shape), unpack(jnp.asarray(packed), shape), strict=True):
        assert ours.tolist() == theirs.tolist()


def test_decodes_and_chunks_lie_one_after_another():
    decode = make_request([1, 2, 3], [4, 5], num_shared=2)
    chunk = make_request([10, 11, 12, 13, 14, 15], num_shared=0)
    inputs = built([row(decode, 4, 1, slot=3, is_sampled=True), row(chunk, 2, 3, slot=1)])
    assert inputs.token_ids[:4].tolist() == [5, 12, 13, 14]
    assert inputs.q_start[:3].tolist() == [0, 1, 4] and set(inputs.q_start[3:]) == {4}
    assert inputs.kv_len.tolist() == [5, 5, 0, 0, 0, 0, 0, 0]
    assert inputs.row_slot[:2].tolist() == [3, 1]
    assert inputs.is_sampled.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert inputs.write_from[:2].tolist() == [2, 0]
    assert inputs.min_rope_len[:2].tolist() == [3, 6]
    assert inputs.wants_prompt_logprobs.tolist() == [0]


def test_a_token_still_on_the_device_is_asked_for_there():
    pending = make_request([1, 2, 3], num_pending=1)
    read = make_request([1, 2, 3], [9], num_pending=1)
    resumed = make_request([1, 2, 3], [7, 8], num_pending=1)
    rows = [row(pending, 3, 1), row(read, 3, 1, slot=1), row(resumed, 2, 4, slot=2)]
    ids = built(rows).token_ids
    assert ids[:6].tolist() == [ON_DEVICE, 9, 3, 7, 8, ON_DEVICE]


def test_a_chunk_may_span_prompt_and_output():
    request = make_request([1, 2, 3], [4, 5, 6])
    for start in range(6):
        for stop in range(start + 1, 7):
            ids = built([row(request, start, stop - start)]).token_ids
            assert ids[: stop - start].tolist() == [1, 2, 3, 4, 5, 6][start:stop]


def test_entries_are_carried_and_the_rest_points_past_the_slots():
    entries = [PageEntry(3, 1, 17), PageEntry(0, 2, 5)]
    inputs = built([row(make_request([1] * 9), 0, 9)], entries)
    assert inputs.entry_slot.tolist() == [3, 0] + [NUM_SLOTS] * 10
    assert inputs.entry_index[:2].tolist() == [1, 2]
    assert inputs.entry_page[:2].tolist() == [17, 5]


def test_targets_are_the_prompt_tokens_that_follow():
    asks = make_request([1, 2, 3, 4, 5], prompt_logprobs=0)
    other = make_request([50, 60, 70])
    inputs = built([row(other, 0, 2, slot=1), row(asks, 2, 3)])
    assert inputs.wants_prompt_logprobs.tolist() == [1]
    # Position 4 is the prompt's last: nothing follows. The other row did not ask.
    assert inputs.target_ids.tolist() == [0, 0, 4, 5] + [0] * 12
    inputs = built([row(asks, 1, 1)])
    assert inputs.target_ids[0] == 3


def test_a_decode_past_its_prompt_has_no_target():
    asks = make_request([1, 2], [3], prompt_logprobs=0)
    assert built([row(asks, 2, 1)]).target_ids.tolist() == [0] * 16


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_rows_may_fill_the_bucket(num_rows):
    rows = [row(make_request([slot + 1]), 0, 1, slot) for slot in range(num_rows)]
    inputs = built(rows, bucket=num_rows)
    assert inputs.token_ids.tolist() == inputs.q_start[1:].tolist()
    assert inputs.kv_len.tolist() == [1] * num_rows


def test_a_bucket_has_no_more_rows_than_tokens_or_slots():
    assert StepShape.of_bucket(4, 16, 64) == StepShape(4, 4, 4)
    assert StepShape.of_bucket(64, 16, 16) == StepShape(64, 16, 20)
    assert StepShape.of_bucket(64, 16, 1) == StepShape(64, 16, 80)


def test_more_than_the_shape_holds_is_our_own_mistake():
    rows = [row(make_request([1]), 0, 1, slot) for slot in range(3)]
    with pytest.raises(AssertionError):
        built(rows, bucket=2)
    with pytest.raises(AssertionError):
        built(rows[:1], [PageEntry(0, i, i) for i in range(3)], bucket=1, page_size=4)


def test_the_device_derives_positions_and_cells_from_the_rows():
    """`ragged_batch` against a loop: two rows, an empty one, padding, a shared prefix."""
    B, num_pages, T = 4, 20, 12
    q_len, kv_len, write_from = [1, 6, 0], [9, 8, 0], [8, 4, 0]
    table = np.array([[3, 1, 7], [5, 0, 9], [2, 2, 2]], np.int32)
    prompt_len = [5, 30, 0]
    fields = ([0, 1, 7, 7], kv_len, table, write_from, prompt_len)
    rows = StepRows(*(jnp.asarray(x, jnp.int32) for x in fields))
    batch = ragged_batch(rows, T, page_size=B, num_pages=num_pages)
    expected = []
    for r in range(3):
        for position in range(kv_len[r] - q_len[r], kv_len[r]):
            page = table[r, position // B] if position >= write_from[r] else num_pages
            expected.append((position, page, position % B, max(prompt_len[r], position + 1)))
    found = (batch.positions, batch.write_page, batch.write_offset, batch.rope_len)
    assert np.stack(found, axis=1)[:7].tolist() == [list(map(int, row)) for row in expected]
    assert (np.asarray(batch.write_page)[7:] >= num_pages).all(), "padding is not stored"


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_page_bytes_are_what_the_pages_take(dtype):
    shape = {"cache": CacheShape(3, 2, 4), "page_size": 8, "dtype": jnp.dtype(dtype)}
    layers = allocate(num_pages=5, **shape)
    assert len(layers) == 3 and {layer.k.shape for layer in layers} == {(5, 2, 8, 4)}
    assert all(layer.v is not None and layer.v.dtype.name == dtype for layer in layers)
    scales = {None if layer.k_scales is None else layer.k_scales.shape for layer in layers}
    assert scales == {None if dtype == "bfloat16" else (5, 2, 8)}
    total = sum(array.nbytes for array in jax.tree.leaves(layers))
    assert total == 5 * page_bytes(**shape)


@settings(deadline=None, max_examples=100)
@given(
    page_size=st.sampled_from([1, 2, 3, 4, 16]),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 8),
    growth=st.integers(2, 5),
    prompts=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=8
    ),
    num_pages=st.integers(0, 40),
)
def test_the_plans_of_a_real_scheduler_fit_their_buckets(
    page_size, budget, max_num_seqs, growth, prompts, num_pages
):
    needed = max(-(-(length + more) // page_size) for length, more, _ in prompts)
    pool = PagePool(max(num_pages, needed), page_size)
    policy = POLICIES["first_come"](max_num_seqs)
    scheduler = Scheduler(pool, policy, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    config = from_mapping(
        {
            "scheduler": {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs},
            "bucket_growth": growth,
        }
    )
    for arrival, (length, more, token) in enumerate(prompts):
        request = Request(
            "r",
            [token] * length,
            SamplingParams(prompt_logprobs=0 if token == 3 else None),
            max_len=length + more,
            rank=Rank(arrival=arrival),
            cache_root=None if token == 3 else root_key("x"),
        )
        scheduler.add(request)
        _check_step(scheduler, config)
    while scheduler.has_requests:
        _check_step(scheduler, config)
    pool.check()


def _check_step(scheduler: Scheduler, config: EngineConfig) -> None:
    """Plan, pack, compare, commit."""
    plan = scheduler.schedule()
    num_slots = config.scheduler.max_num_seqs
    bucket = config.bucket_for(plan.num_tokens)
    shape = StepShape.of_bucket(bucket, num_slots, scheduler.pool.page_size)
    inputs = unpack(build(plan, shape, num_slots), shape)
    assert inputs.q_start[-1] == plan.num_tokens
    assert (inputs.entry_slot < num_slots).sum() == len(plan.entries)
    for i, planned in enumerate(plan.rows):
        request, first = planned.request, inputs.q_start[i]
        known = request.prompt_token_ids + request.output_token_ids
        found = inputs.token_ids[first : inputs.q_start[i + 1]].tolist()
        assert found == known[planned.start : planned.end]
    for planned in plan.rows:
        request = planned.request
        if planned.is_sampled:
            request.read(len(request.output_token_ids) % 2)
        scheduler.register_pages(request)
        if request.read_len >= request.max_len:
            scheduler.finish(request, FinishReason.LENGTH)
