"""The scheduler: which rows run in a step, how many tokens each, and on which pages.

Pure Python over integers, without phases. Each step has one budget of tokens; the computed tokens
of every running request catch up with its known ones. Decodes (one token to compute) are served
before the chunks of prefills; then waiting requests join while budget, slots and pages last. A hit
in the prefix cache, a chunk and a recomputation after preemption are the same arithmetic
(`request.py`).

When pages run out, the running request that the policy puts last is *preempted*: its pages are
released (full ones into the prefix cache), and it waits to be computed again. The first request in
order always finishes, since one that the whole pool cannot hold is refused at admission.

In a pipeline of S stages a step's tokens are sampled S - 1 steps later. A request whose next token
is among them waits until then, so S groups of requests alternate; a step takes at most an equal
share of the decodes, so the groups become equal. A released slot is not used again while a step in
flight can still write to it.

Some models recompute a sequence once, when it passes a length (`restart_len`; LongRoPE): its pages
are released too, it waits to be computed again, and its tokens' RoPE length is then at least
`restart_len + 1`. Running requests may take its pages; no request behind it in the queue is
admitted first.
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
    min_rope_len: int  # the least sequence length that RoPE scalings use for its tokens

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class PageEntry(NamedTuple):
    """A new entry of a slot's page table."""

    slot: int
    index: int
    page: int


class Plan(NamedTuple):
    """A step. Before it, the slots of `admitted` are written whole; other rows get `entries`."""

    rows: list[Row]  # decodes first
    admitted: list[Request]
    entries: list[PageEntry]
    preempted: list[Request]

    @property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])


class Scheduler:
    """Owns the queues, the slots and the page pool.

    `max_num_batched_tokens` is the budget of a step, `max_num_seqs` the number of slots. A request
    must fit the pool (the engine checks it at admission):
    `pool.pages_for(request.max_len - 1) <= pool.num_pages`.
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
        self._cooling_slots: deque[tuple[int, int]] = deque()  # (the step when it is free, slot)
        self._num_planned = 0  # steps
        self._ready_at: dict[str, int] = {}  # in a pipeline: the step that may take the next token
        self._restarted: set[str] = set()  # requests that have passed `restart_len`
        self.num_preemptions = 0
        self.num_shared_tokens = 0  # tokens that the prefix cache has spared from computing

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=self.policy.order)

    def schedule(self) -> Plan:
        """Plan a step: take pages and slots, and count the step's tokens as computed."""
        plan = Plan([], [], [], [])
        while self._cooling_slots and self._cooling_slots[0][0] <= self._num_planned:
            self._free_slots.append(self._cooling_slots.popleft()[1])
        chunks: list[Row] = []  # rows of several tokens: they come after the decodes
        budget = self._run(plan, chunks)
        if not plan.preempted:
            self._admit(plan, chunks, budget)
        plan.rows.extend(chunks)
        if self.num_stages > 1:
            for row in plan.rows:
                ready_at = self._num_planned + (self.num_stages * row.is_sampled)
                self._ready_at[row.request.id] = ready_at
        self._num_planned += 1
        self.policy.planned(len(self.waiting))
        return plan

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Remove a request, running or waiting, and release its pages and slot.

        This is safe while a step with the request is in flight: the device runs steps in order, so
        the next owner of the pages overwrites what that step still writes. In a pipeline the slot
        is free once no step in flight can write to it.
        """
        request.finish_reason = reason
        if request.slot is not None:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        self._ready_at.pop(request.id, None)
        self._restarted.discard(request.id)

    def reset(self, requests: list[Request]) -> None:
        """Start over: all `requests` wait with nothing computed, and every slot is free. The caller
        has reset the pool."""
        for request in requests:
            request.slot = None
            request.drop_pending()
            request.forget_pages()
        self._ready_at.clear()
        self.running = []
        self.waiting = sorted(requests, key=self.policy.order)
        self._free_slots = list(range(self._max_rows - 1, -1, -1))
        self._cooling_slots.clear()

    def register_pages(self, request: Request) -> None:
        """Put the request's pages that are full, computed and read into the prefix cache."""
        root, keys = request.prefix.root, request.prefix.keys
        if root is None or request.slot is None:
            return
        B = self.pool.page_size
        num_full = min(request.computed_len, request.read_len) // B
        for index in range(len(keys), num_full):
            token_ids = request.token_ids(index * B, (index + 1) * B)
            key = page_key(keys[-1] if keys else root, token_ids)
            keys.append(key)
            self.pool.register(request.pages[index], key, token_ids)

    def check(self) -> None:
        """Assert the invariants that relate requests, slots and pages."""
        self.pool.check()
        num_owners: dict[int, int] = {}
        for request in self.running:
            assert request.slot is not None and not request.is_finished
            assert len(request.pages) >= self.pool.pages_for(request.computed_len), request.id
            for page in request.pages:
                num_owners[page] = num_owners.get(page, 0) + 1
        for request in self.waiting:
            assert request.slot is None and not request.pages and not request.is_finished
        for page in range(self.pool.num_pages):
            assert self.pool.num_references(page) == num_owners.get(page, 0), f"page {page}: leaked"
        cooling = [slot for _, slot in self._cooling_slots]
        slots = [request.slot for request in self.running] + self._free_slots + cooling
        assert len(slots) == len(set(slots)), "a slot is used twice"

    def _run(self, plan: Plan, chunks: list[Row]) -> int:
        """Plan rows for the running requests; return what is left of the budget."""
        page_size = self.pool.page_size
        if self.restart_len is not None:
            self._restart(self.restart_len, plan)
        running = self._ready()
        extend_lens = [request.extend_len for request in running]
        budget = self.max_num_batched_tokens
        chunk_budget = max(0, budget - extend_lens.count(1))
        for request, extend_len in zip(running, extend_lens, strict=True):
            num_tokens = min(extend_len, budget if extend_len == 1 else chunk_budget)
            if request.slot is None or num_tokens <= 0:  # preempted a moment ago, or waiting
                continue
            is_full = request.computed_len + num_tokens > len(request.pages) * page_size
            if is_full and not self._grow(request, num_tokens, plan):
                continue
            budget -= num_tokens
            chunk_budget -= num_tokens if extend_len > 1 else 0
            (plan.rows if num_tokens == 1 else chunks).append(self._row(request, num_tokens))
        return budget

    def _ready(self) -> list[Request]:
        """Return a copy of the running requests, since preemption removes from the list. In a
        pipeline: those whose next token is known or sampled by now, with a step's share of the
        decodes."""
        if self.num_stages == 1:
            return self.running.copy()
        num_decodes_left, ready = -(-len(self.running) // self.num_stages), []
        for request in self.running:
            is_decode = request.extend_len == 1
            is_ready = self._ready_at.get(request.id, 0) <= self._num_planned
            if is_ready and (not is_decode or num_decodes_left > 0):
                ready.append(request)
                num_decodes_left -= is_decode
        return ready

    def _grow(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Take pages for `num_tokens` more, preempting other requests if need be. Returns False if
        the request itself was preempted."""
        num_needed = self.pool.pages_for(request.computed_len + num_tokens) - len(request.pages)
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
        """Preempt requests that pass `length` with their next token, and were computed as shorter
        ones."""
        for request in self.running.copy():
            if request.target_len > length >= self._min_rope_len(request, length):
                self._preempt(request, plan)

    def _preempt(self, request: Request, plan: Plan) -> None:
        """Move a running request to the waiting ones; the plan must have no row of it yet."""
        self.running.remove(request)
        self._release(request)
        self.num_preemptions += 1
        self.add(request)
        plan.preempted.append(request)

    def _admit(self, plan: Plan, chunks: list[Row], budget: int) -> None:
        """Plan rows for waiting requests while budget, slots and pages last."""
        while self.waiting and self._free_slots and budget > 0:
            request = self.waiting[0]
            # A preempted request's last token may still be on the device: it waits for that step.
            if request.pending_len or not self.policy.may_admit(len(self.running)):
                return
            self._share_prefix(request)
            num_tokens = min(request.extend_len, budget)
            # Pages for all known tokens must be free, not for the first chunk alone, or the request
            # would soon be preempted.
            num_needed = self.pool.pages_for(request.target_len) - len(request.pages)
            num_taken = self.pool.pages_for(request.computed_len + num_tokens) - len(request.pages)
            if num_needed > self.pool.num_available and self.running:
                self._unshare(request)
                return
            new_pages = self.pool.allocate(max(num_taken, 0))
            if new_pages is None:
                self._unshare(request)
                return
            request.pages += new_pages
            if self.restart_len is not None and request.target_len > self.restart_len:
                self._restarted.add(request.id)
            request.slot = self._free_slots.pop()
            self.waiting.pop(0)
            bisect.insort(self.running, request, key=self.policy.order)
            self.policy.admitted()
            self.num_shared_tokens += request.computed_len
            if request.prefix.hit_len is None:
                request.prefix.hit_len = request.computed_len
            budget -= num_tokens
            plan.admitted.append(request)
            (plan.rows if num_tokens == 1 else chunks).append(self._row(request, num_tokens))

    def _share_prefix(self, request: Request) -> None:
        """Start a request from cached pages, if they hold a prefix of it."""
        if request.prefix.root is None:
            return
        known = request.token_ids(0, request.known_len)
        request.pages, request.prefix.keys = self.pool.match_prefix(request.prefix.root, known)
        request.skip(len(request.pages) * self.pool.page_size)

    def _unshare(self, request: Request) -> None:
        """Undo `_share_prefix`."""
        self.pool.release(request.pages)
        request.forget_pages()

    def _release(self, request: Request) -> None:
        """Release a running request's slot and pages."""
        assert request.slot is not None
        if self.num_stages == 1:
            self._free_slots.append(request.slot)
        else:
            self._cooling_slots.append((self._num_planned + self.num_stages, request.slot))
        request.slot = None
        self.pool.release(request.pages)
        request.forget_pages()

    def _row(self, request: Request, num_tokens: int) -> Row:
        """A request's row of the step being planned, counted as computed."""
        assert request.slot is not None
        start, min_rope_len = request.computed_len, len(request.prompt_token_ids)
        if self.restart_len is not None:
            min_rope_len = self._min_rope_len(request, self.restart_len)
        is_sampled = request.extend(num_tokens)
        return Row(request, request.slot, start, num_tokens, is_sampled, min_rope_len)

    def _min_rope_len(self, request: Request, restart_len: int) -> int:
        is_past = request.id in self._restarted
        return max(request.prompt_len, restart_len + 1) if is_past else request.prompt_len
