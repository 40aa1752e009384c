"""The scheduler: which rows run in a step, how many tokens each, and on which pages.

Pure Python over integers, no phases. Each step has one budget of tokens; every running request
lets its computed tokens catch up with its known ones. A decode (one token to go) is served before
the chunks of prefills, then waiting requests join while budget, slots and pages last. A hit in the
prefix cache, a chunk and a re-computation after preemption are the same arithmetic (`request.py`).

When pages run out, the running request that the policy puts last is *preempted*: its pages go back
(full ones into the prefix cache), and it waits to be computed again. The first in order always gets
through, since a request that the whole pool cannot hold is refused at admission.

In a pipeline of S stages a step's tokens are sampled S - 1 steps later. A request whose next token
is among them waits until then, so that S groups of requests take turns; a step takes no more
decodes than an equal share of them, and so the groups become equal. A slot that was given back
rests until nothing under way can write to it.

Some models compute a sequence anew once, when it passes a length (`restart_len`): its pages go back
too, and it waits to be computed again, with `Request.rope_len` saying that it has passed. Those
that run may take its pages; nobody who waits behind it is admitted first.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import NamedTuple

from jaxinfer.engine.pages import PagePool, page_key
from jaxinfer.engine.policies import Policy
from jaxinfer.engine.request import FinishReason, Request


class Row(NamedTuple):
    """One request's share of a step: tokens [start, start + num_tokens)."""

    request: Request
    slot: int
    start: int
    num_tokens: int
    is_sampled: bool

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class PageEntry(NamedTuple):
    """A new entry of a slot's page table."""

    slot: int
    index: int
    page: int


class Plan(NamedTuple):
    """A step. `admitted` rows have their whole slot written before it, the others get `entries`."""

    rows: list[Row]  # decodes first
    admitted: list[Request]
    entries: list[PageEntry]
    preempted: list[Request]

    @property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])


class Scheduler:
    """Owns the queues, the slots and the page pool.

    `max_num_batched_tokens` is the budget of a step, `max_num_seqs` the number of slots. Requests
    must fit:
    `pool.pages_for(request.max_len - 1) <= pool.num_pages` (the engine checks at admission).
    """

    def __init__(
        self,
        pool: PagePool,
        policy: Policy,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        restart_len: int | None = None,
        num_stages: int = 1,
    ):
        self.pool = pool
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.restart_len = restart_len
        self.num_stages = num_stages
        self.waiting: list[Request] = []  # in the policy's order
        self.running: list[Request] = []  # the same
        self._max_rows = max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._resting: deque[tuple[int, int]] = deque()  # slots, and the step when they are free
        self._num_planned = 0  # steps
        self.num_preemptions = 0
        self.num_shared_tokens = 0  # tokens that the prefix cache has spared from computing

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=self.policy.order)

    def schedule(self) -> Plan:
        """Plan a step and count its tokens as computed. Pages and slots are taken here."""
        plan = Plan([], [], [], [])
        while self._resting and self._resting[0][0] <= self._num_planned:
            self._free_slots.append(self._resting.popleft()[1])
        chunks: list[Row] = []  # rows of several tokens: they come after the decodes
        budget = self._run(plan, chunks)
        if not plan.preempted:
            self._admit(plan, chunks, budget)
        plan.rows.extend(chunks)
        if self.num_stages > 1:
            for row in plan.rows:
                row.request.ready_at = self._num_planned + (self.num_stages * row.is_sampled)
        self._num_planned += 1
        self.policy.planned(len(self.waiting))
        return plan

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out, wherever it is; its pages are free at once, its slot too, in a
        pipeline once nothing under way can write to it.

        Safe while a step that holds it is in flight: the device runs steps in order, so whoever
        gets the pages next overwrites what that step still writes.
        """
        request.finish_reason = reason
        if request.slot is not None:
            self.running.remove(request)
            self._give_back(request)
        else:
            self.waiting.remove(request)

    def reset(self, requests: list[Request]) -> None:
        """Let `requests` wait with nothing computed and every slot be free; so must the pool be."""
        for request in requests:
            request.slot = None
            request.drop_pending()
            request.ready_at = 0
            request.forget_pages()
        self.running = []
        self.waiting = sorted(requests, key=self.policy.order)
        self._free_slots = list(range(self._max_rows - 1, -1, -1))
        self._resting.clear()

    def register_pages(self, request: Request) -> None:
        """Put the request's pages that are full, computed and read into the prefix cache."""
        if request.cache_root is None or request.slot is None:
            return
        B = self.pool.page_size
        num_full = min(request.num_computed, request.num_read) // B
        for index in range(len(request.page_keys), num_full):
            parent = request.page_keys[-1] if request.page_keys else request.cache_root
            token_ids = request.token_ids(index * B, (index + 1) * B)
            key = page_key(parent, token_ids)
            request.page_keys.append(key)
            self.pool.register(request.pages[index], key, token_ids)

    def check(self) -> None:
        """Assert the laws that tie requests, slots and pages together."""
        self.pool.check()
        held: dict[int, int] = {}
        for request in self.running:
            assert request.slot is not None and not request.is_finished
            assert len(request.pages) >= self.pool.pages_for(request.num_computed), request.id
            for page in request.pages:
                held[page] = held.get(page, 0) + 1
        for request in self.waiting:
            assert request.slot is None and not request.pages and not request.is_finished
        for page in range(self.pool.num_pages):
            assert self.pool.num_references(page) == held.get(page, 0), f"page {page}: leaked"
        slots = [r.slot for r in self.running] + self._free_slots + [s for _, s in self._resting]
        assert len(slots) == len(set(slots)), "a slot is used twice"

    def _run(self, plan: Plan, chunks: list[Row]) -> int:
        """Rows for the running requests; returns what is left of the budget."""
        page_size = self.pool.page_size
        if self.restart_len is not None:
            self._restart(self.restart_len, plan)
        running = self._ready()
        todo = [request.num_remaining for request in running]
        budget = self.max_num_batched_tokens
        chunk_budget = max(0, budget - todo.count(1))
        for request, remaining in zip(running, todo, strict=True):
            num_tokens = min(remaining, budget if remaining == 1 else chunk_budget)
            if request.slot is None or num_tokens <= 0:  # preempted a moment ago, or waiting
                continue
            is_full = request.num_computed + num_tokens > len(request.pages) * page_size
            if is_full and not self._grow(request, num_tokens, plan):
                continue
            budget -= num_tokens
            chunk_budget -= num_tokens if remaining > 1 else 0
            (plan.rows if num_tokens == 1 else chunks).append(_row(request, num_tokens))
        return budget

    def _ready(self) -> list[Request]:
        """A copy of the running requests, since preemption takes from them; in a pipeline, of those
        whose next token is known or sampled by now, and no more decodes than are due in a step."""
        if self.num_stages == 1:
            return self.running.copy()
        most, ready = -(-len(self.running) // self.num_stages), []
        for request in self.running:
            is_decode = request.num_remaining == 1
            if request.ready_at <= self._num_planned and (not is_decode or most > 0):
                ready.append(request)
                most -= is_decode
        return ready

    def _grow(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Pages for `num_tokens` more, preempting others if need be; False: it was preempted."""
        num_needed = self.pool.pages_for(request.num_computed + num_tokens) - len(request.pages)
        while (new_pages := self.pool.allocate(num_needed)) is None:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return False
        assert request.slot is not None
        for page in new_pages:
            plan.entries.append(PageEntry(request.slot, len(request.pages), page))
            request.pages.append(page)
        return True

    def _restart(self, length: int, plan: Plan) -> None:
        """Preempt those whose next token passes `length`, and whose others were computed before."""
        for request in self.running.copy():
            if request.num_to_compute > length >= request.rope_len:
                self._preempt(request, plan)

    def _preempt(self, request: Request, plan: Plan) -> None:
        """Take it from the running ones; this step must hold no row of it yet."""
        self.running.remove(request)
        self._give_back(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)
        plan.preempted.append(request)

    def _admit(self, plan: Plan, chunks: list[Row], budget: int) -> None:
        while self.waiting and self._free_slots and budget > 0:
            request = self.waiting[0]
            # A preempted request's last token may still be on the device: one step's patience.
            if request.num_pending or not self.policy.may_admit(len(self.running)):
                return
            self._share_prefix(request)
            num_tokens = min(request.num_remaining, budget)
            # Room for all it knows, not for its first chunk alone, or it would be preempted soon.
            num_needed = self.pool.pages_for(request.num_to_compute) - len(request.pages)
            num_taken = self.pool.pages_for(request.num_computed + num_tokens) - len(request.pages)
            if num_needed > self.pool.num_available and self.running:
                self._unshare(request)
                return
            new_pages = self.pool.allocate(max(num_taken, 0))
            if new_pages is None:
                self._unshare(request)
                return
            request.pages += new_pages
            if self.restart_len is not None and request.num_to_compute > self.restart_len:
                request.rope_len = max(request.prompt_len, self.restart_len + 1)
            request.slot = self._free_slots.pop()
            self.waiting.pop(0)
            bisect.insort(self.running, request, key=self.policy.order)
            self.policy.admitted()
            self.num_shared_tokens += request.num_computed
            if request.num_preemptions == 0:
                request.num_cached = request.num_computed
            budget -= num_tokens
            plan.admitted.append(request)
            (plan.rows if num_tokens == 1 else chunks).append(_row(request, num_tokens))

    def _share_prefix(self, request: Request) -> None:
        """Start from cached pages. At least one token is computed: the last one, for its logits."""
        if request.cache_root is None:
            return
        known = request.token_ids(0, request.num_known)
        request.pages, request.page_keys = self.pool.share(request.cache_root, known)
        request.num_shared = len(request.pages) * self.pool.page_size
        request.num_computed = min(request.num_shared, request.num_to_compute - 1)

    def _unshare(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.forget_pages()

    def _give_back(self, request: Request) -> None:
        assert request.slot is not None
        if self.num_stages == 1:
            self._free_slots.append(request.slot)
        else:
            self._resting.append((self._num_planned + self.num_stages, request.slot))
        request.slot = None
        self.pool.release(request.pages)
        request.forget_pages()


def _row(request: Request, num_tokens: int) -> Row:
    """Its share of the step being planned, counted as computed."""
    assert request.slot is not None
    start = request.num_computed
    return Row(request, request.slot, start, num_tokens, request.plan(num_tokens))
