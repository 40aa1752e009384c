"""A device without arrays: it stands in for the `Runner` under a real `Engine`.

A cell of its cache holds, instead of numbers, what they would be a function of: who may read it and
the ids of every token up to it. So each step can check that what a row reads through its page table
is exactly its own prefix, that a prefix hit never crosses salts, and that nobody writes to a page
that somebody else reads. "Sampling" is a checksum of the row's tokens. Steps go through the real
packed buffer (`jaxinfer.execution.batch`), and run at once, in the order of their dispatch;
reading them
late, as an overlapping engine does, changes nothing about that order.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jaxinfer.engine.engine
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.scheduler import Plan, Scheduler
from jaxinfer.execution.batch import ON_DEVICE, StepShape, build, unpack
from jaxinfer.nn.layers import Numerics
from jaxinfer.parallel.hosts import ALONE
from jaxinfer.sampling.params import MAX_LOGPROBS
from jaxinfer.sharding.rules import ONE_DEVICE

VOCAB_SIZE = 5
MAX_LEN = 24  # tokens of context


def next_token(token_ids: Sequence[int]) -> int:
    """What the fake model says after `token_ids`."""
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


def fake_logprob(token_ids: Sequence[int], target: int) -> float:
    """What it reports of `target` coming after `token_ids`."""
    return -float(zlib.crc32(bytes([*token_ids, target])) % 1000)


def expected_output(prompt: Sequence[int], max_len: int, stops: Sequence[int]) -> list[int]:
    """What a request must produce, whoever runs beside it."""
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Pages of (root, ids) cells behind the interface that `Engine` uses of a `Runner`."""

    cache_dtype = "ids"
    is_under_way = False
    peers = ALONE

    def __init__(self, forward: Any, weights: Any, config: EngineConfig, max_len: int):
        self.config = config
        self.page_size = config.cache.page_size
        self.num_pages = config.cache.num_pages or 0
        self.memory = SimpleNamespace(num_pages=self.num_pages)
        self.num_slots = config.scheduler.max_num_seqs
        self.table_width = -(-max_len // self.page_size)
        self.cells: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.tables: list[dict[int, int]] = [{} for _ in range(self.num_slots)]
        self.last_token: list[int | None] = [None] * self.num_slots
        self.admitted: list[int] = []  # slots, since the last step
        self.scheduler: Scheduler  # given by `fake_engine`
        self.num_steps = 0
        self.owners: dict[str, str] = {}  # request id -> who may read its pages

    def admit(self, admission: Any, extras: Any) -> None:
        assert len(admission.pages) <= self.table_width
        self.tables[admission.slot] = dict(enumerate(admission.pages))
        self.last_token[admission.slot] = None
        self.admitted.append(admission.slot)

    def dispatch(self, plan: Plan) -> Any:
        check_plan(plan, self.scheduler)
        assert self.admitted == [request.slot for request in plan.admitted]
        self.admitted = []
        self.num_steps += 1
        bucket = self.config.bucket_for(plan.num_tokens)
        shape = StepShape.of_bucket(bucket, self.num_slots, self.page_size)
        inputs = unpack(build(plan, shape, self.num_slots), shape)
        self._write_entries(inputs)
        for row in plan.rows:  # the tables say what the host says
            table = self.tables[row.slot]
            assert [table.get(i) for i in range(len(row.request.pages))] == row.request.pages
        tokens = np.zeros(shape.num_rows, np.int32)
        logprobs = np.full(shape.num_tokens, np.nan)
        for i, row in enumerate(plan.rows):
            tokens[i] = self._run(inputs, i, row.request, logprobs)
        top = np.full((shape.num_tokens, MAX_LOGPROBS), -1, np.int32)
        prompt = (logprobs, top, np.zeros(top.shape))
        return plan, SimpleNamespace(sampled=SimpleNamespace(tokens=tokens), prompt=prompt)

    def _write_entries(self, inputs: Any) -> None:
        entries = zip(inputs.entry_slot, inputs.entry_index, inputs.entry_page, strict=True)
        for slot, index, page in entries:
            if slot < self.num_slots:
                assert index < self.table_width and page < self.num_pages
                self.tables[slot][int(index)] = int(page)

    def _run(self, inputs: Any, i: int, request: Any, logprobs: np.ndarray) -> int:
        """Row i: read its prefix, write its tokens, sample."""
        first, end = int(inputs.q_start[i]), int(inputs.q_start[i + 1])
        slot, kv_len = int(inputs.row_slot[i]), int(inputs.kv_len[i])
        start, table = kv_len - (end - first), self.tables[slot]
        root = self.owners[request.id]
        write_from = int(inputs.write_from[i])
        ids: list[int] = []
        for position in range(start):
            ids.append(self._read(table, position, root, ids))
        for t in range(first, end):
            position = start + t - first
            token = int(inputs.token_ids[t])
            if token == ON_DEVICE:
                token = self.last_token[slot]
                assert token is not None, "no token on the device yet"
            if position >= write_from:
                page = table[position // self.page_size]
                assert self.scheduler.pool.num_references(page) == 1, f"page {page} is shared"
                self.cells[page, position % self.page_size] = (root, (*ids, token))
            else:
                assert self._read(table, position, root, ids) == token
            ids.append(token)
            if inputs.wants_prompt_logprobs[0]:
                logprobs[t] = fake_logprob(ids, int(inputs.target_ids[t]))
        if not inputs.is_sampled[i]:
            return -1
        self.last_token[slot] = next_token(ids)
        return next_token(ids)

    def _read(self, table: dict[int, int], position: int, root: str, ids: list[int]) -> int:
        """The token of a cached position, all of whose content must be this row's."""
        cell = table[position // self.page_size], position % self.page_size
        owner, content = self.cells[cell]
        assert owner == root, f"cell {cell} belongs to {owner}"
        assert content[:-1] == tuple(ids), f"cell {cell} holds another prefix"
        return content[-1]


def check_plan(plan: Plan, scheduler: Scheduler) -> None:
    """Check the invariants of a plan right after `schedule`."""
    assert 1 <= len(plan.rows) <= len(scheduler.running)
    assert all(row.num_tokens >= 1 for row in plan.rows)
    assert plan.num_tokens <= scheduler.max_num_batched_tokens
    sizes = [row.num_tokens > 1 for row in plan.rows]
    assert sizes == sorted(sizes), "decodes first"
    for requests in ([row.request for row in plan.rows], plan.admitted, plan.preempted):
        assert len({id(request) for request in requests}) == len(requests), "twice in a step"
    for row in plan.rows:
        request = row.request
        assert request.slot == row.slot and not request.is_finished
        assert row.end == request.computed_len <= request.max_len - 1
        assert scheduler.pool.pages_for(row.end) <= len(request.pages)
    rows = {id(row.request) for row in plan.rows}
    assert {id(request) for request in plan.admitted} <= rows
    assert not rows & {id(request) for request in plan.preempted}
    _check_entries(plan, scheduler.pool)
    order = scheduler.policy.order
    for requests in (scheduler.running, scheduler.waiting):
        assert [order(r) for r in requests] == sorted(order(r) for r in requests)
    if plan.admitted and scheduler.waiting:  # nobody overtakes the head of the queue
        assert max(map(order, plan.admitted)) < order(scheduler.waiting[0])


def _check_entries(plan: Plan, pool: PagePool) -> None:
    """Every row that was running before has exactly its pages' new tail as entries."""
    admitted = {request.slot for request in plan.admitted}
    for row in plan.rows:
        entries = [(e.index, e.page) for e in plan.entries if e.slot == row.slot]
        if row.slot in admitted:
            assert not entries
            continue
        old = max(pool.pages_for(row.start), pool.pages_for(row.request.prefix.shared_len))
        assert entries == list(enumerate(row.request.pages))[old:]
    assert {e.slot for e in plan.entries} <= {row.slot for row in plan.rows}


def fake_engine(config: EngineConfig) -> Engine:
    """A real engine over a fake device and a model of `VOCAB_SIZE` tokens."""
    shape = SimpleNamespace(max_len=MAX_LEN, vocab_size=VOCAB_SIZE, length_limit=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxinfer.engine.engine, "Runner", FakeRunner)
        # The fake runner has no use for a forward pass.
        patch.setattr(jaxinfer.engine.engine, "forward_for", lambda model, page_size: None)
        family = SimpleNamespace(restarts_at_limit=False)
        model = SimpleNamespace(
            config=shape, numerics=Numerics(), family=family, num_stages=1, layout=ONE_DEVICE
        )
        model.model = model  # on one device it is its own
        engine = Engine(model, (), config)  # type: ignore[arg-type]
    engine.runner.scheduler = engine.scheduler  # type: ignore[attr-defined]
    return engine
