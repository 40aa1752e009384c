"""The scheduler by hand: budget, order, admission, preemption, sharing.

Its life under random use, with a device that checks what is read: `test_scheduler_machine.py`.
"""

from __future__ import annotations

import pytest

from jaxinfer.engine.pages import root_key
from jaxinfer.engine.request import FinishReason
from jaxinfer.engine.scheduler import Plan
from tests.support.scheduler_bench import ROOT, TOKEN, Bench, ids, sizes


def test_an_idle_scheduler_plans_nothing():
    bench = Bench()
    assert bench.plan() == Plan([], [], [], [])
    assert not bench.scheduler.has_requests


def test_a_prompt_is_cut_to_the_budget_and_sampled_at_its_end():
    bench = Bench(budget=4)
    bench.add(10, max_tokens=3)
    rows = [bench.step().rows[0] for _ in range(5)]
    assert [(row.start, row.num_tokens) for row in rows] == [
        (0, 4),
        (4, 4),
        (8, 2),
        (10, 1),
        (11, 1),
    ]
    assert [row.is_sampled for row in rows] == [False, False, True, True, True]
    assert not bench.scheduler.has_requests


def test_the_last_token_of_a_full_request_is_never_computed():
    bench = Bench(num_pages=2, page_size=4)
    request = bench.add(8, max_tokens=1)  # nine tokens on eight cells
    bench.run()
    assert len(request.output_token_ids) == 1


def test_prompts_fill_what_the_budget_leaves():
    bench = Bench(budget=10)
    for _ in range(4):
        bench.add(4)
    assert sizes(bench.step()) == {"r0": 4, "r1": 4, "r2": 2}
    assert sizes(bench.step()) == {"r0": 1, "r1": 1, "r2": 2, "r3": 4}


def test_decodes_come_before_the_chunk_of_an_earlier_prompt():
    bench = Bench(budget=6, policy="priority")
    bench.add(4, priority=1)
    bench.step()
    long = bench.add(30, priority=0)  # joins and is first in order from then on
    bench.step()
    for _ in range(3):
        plan = bench.step()
        assert [row.request.id for row in plan.rows] == ["r0", "r1"]
        assert sizes(plan) == {"r0": 1, "r1": 5}
    assert bench.scheduler.running[0] is long


def test_more_rows_than_budget_are_served_in_order():
    bench = Bench(budget=2, rows=4)
    for _ in range(4):
        bench.add(1, max_tokens=4)
    assert [list(sizes(bench.step())) for _ in range(4)] == [["r0", "r1"]] * 4
    assert [list(sizes(bench.step())) for _ in range(4)] == [["r2", "r3"]] * 4


def test_no_more_rows_than_slots_and_slots_come_back():
    bench = Bench(rows=2)
    requests = [bench.add(1, max_tokens=2) for _ in range(5)]
    seen = set()
    for plan in bench.plans():
        assert len(plan.rows) <= 2
        seen |= {row.slot for row in plan.rows}
    assert seen == {0, 1} and all(len(r.output_token_ids) == 2 for r in requests)


def test_under_overlap_a_pending_token_counts_as_known():
    bench = Bench()
    bench.add(4, max_tokens=3)
    first = bench.plan()
    second = bench.plan()  # before the first is read
    assert [(row.start, row.num_tokens, row.is_sampled) for row in second.rows] == [(4, 1, True)]
    third = bench.plan()
    assert [row.start for row in third.rows] == [5]
    assert bench.plan().rows == []  # full: the last token is on its way
    for plan in (first, second, third):
        bench.commit(plan)
    assert not bench.scheduler.has_requests


def test_entries_are_the_new_pages_of_rows_that_run_already():
    bench = Bench(page_size=4, budget=4)
    request = bench.add(11, max_tokens=4)
    plan = bench.step()
    assert plan.admitted == [request] and plan.entries == []
    for index in (1, 2):
        plan = bench.step()
        assert plan.entries == [(request.slot, index, request.pages[index])]
    assert bench.step().entries == []  # position 11 fits into page 2
    assert [(e.index, e.page) for e in bench.step().entries] == [(3, request.pages[3])]


def test_a_request_joins_only_where_all_that_it_knows_has_room():
    bench = Bench(num_pages=8, page_size=4, budget=4)
    bench.add(16, max_tokens=4)
    bench.add(32, max_tokens=1)  # eight pages: its first chunk would fit, its prompt would not
    bench.add(1)
    joined = [ids(plan.admitted) for plan in bench.plans()]
    assert joined[0] == ["r0"] and [j for j in joined if j] == [["r0"], ["r1"], ["r2"]]
    assert joined.index(["r1"]) == 7, "after the four chunks and three decodes of r0"
    assert bench.scheduler.num_preemptions == 0


def test_cached_pages_make_room_for_a_request_as_large_as_the_pool():
    bench = Bench(num_pages=4, page_size=4)
    bench.add(16, max_tokens=1)
    bench.run()
    assert bench.pool.num_cached == 4
    bench.add(16, max_tokens=1)
    bench.run()
    bench.add([*range(1, 9), *range(50, 58)], max_tokens=1)
    bench.run()


def test_preemption_takes_the_last_in_order_and_gives_its_pages_back():
    bench = Bench(num_pages=4, page_size=2, budget=8, rows=3)
    first, last = bench.add(4, max_tokens=4), bench.add(3, max_tokens=4)
    bench.step()
    plan = bench.step()
    assert plan.preempted == [last] and ids(bench.scheduler.running) == ["r0"]
    assert sizes(plan) == {"r0": 1}
    assert last.slot is None and last.pages == [] and last.computed_len == 0
    assert last.prefix.hit_len is not None and bench.scheduler.num_preemptions == 1
    assert last.output_token_ids == [TOKEN], "what it has said stays said"
    bench.run()
    assert first.output_token_ids == last.output_token_ids == [TOKEN] * 4


def test_under_priority_the_urgent_one_takes_the_pages_of_the_rest():
    bench = Bench(num_pages=4, page_size=2, budget=8, policy="priority")
    slow = bench.add(3, max_tokens=4, priority=1)
    bench.step()
    urgent = bench.add(3, max_tokens=4, priority=0)
    assert bench.step().admitted == [urgent]
    assert bench.step().preempted == [slow] and urgent.slot is not None
    bench.run()
    assert len(slow.output_token_ids) == len(urgent.output_token_ids) == 4


def test_a_step_that_preempts_admits_nobody():
    bench = Bench(num_pages=4, page_size=2, budget=16, rows=3)
    bench.add(4, max_tokens=4)
    bench.add(3, max_tokens=4)
    bench.step()
    bench.add(1, max_tokens=1)  # one page would do for it
    plan = bench.step()
    assert plan.preempted and not plan.admitted
    assert ids(bench.scheduler.waiting) == ["r1", "r2"], "the preempted one keeps its turn"


def test_a_preempted_request_waits_for_its_token_still_on_the_device():
    bench = Bench(num_pages=6, page_size=2, budget=16)
    first, last = bench.add(6, max_tokens=4), bench.add(5, max_tokens=2)
    in_flight = bench.plan()
    plan = bench.plan()  # r0's fourth page: r1 has to go, its token unread
    assert plan.preempted == [last] and last.pending_len == 1
    bench.scheduler.finish(first, FinishReason.ABORT)  # now there is room
    assert bench.plan().rows == []
    bench.commit(in_flight)
    resumed = bench.step()
    assert resumed.admitted == [last] and sum(sizes(resumed).values()) + last.prefix.shared_len >= 6
    assert resumed.rows[0].end == 6, "its prompt and the token it had sampled"
    assert last.output_token_ids == [TOKEN] * 2


def test_a_preempted_request_starts_again_from_its_cached_pages():
    bench = Bench(num_pages=16, page_size=2, budget=16)
    bench.add(8, max_tokens=8)
    last = bench.add(7, max_tokens=4)
    bench.step()
    bench.step()
    bench.scheduler._preempt(last, Plan([], [], [], []))  # as if pages had run out
    known = last.read_len
    row = next(row for row in bench.plan().rows if row.request is last)
    assert last.prefix.shared_len == 8 and (row.start, row.end) == (8, known)


@pytest.mark.parametrize("when", ["waiting", "running", "in flight", "preempted"])
def test_a_request_can_end_at_any_moment(when):
    bench = Bench(num_pages=6, page_size=2, budget=16)
    other = bench.add(6, max_tokens=4)
    request = bench.add(5, max_tokens=4)
    plans = [] if when == "waiting" else [bench.plan()]
    if when in ("running", "preempted"):
        bench.commit(plans.pop())
    if when == "preempted":
        bench.step()
        assert request.prefix.hit_len is not None and request.slot is None
    bench.scheduler.finish(request, FinishReason.ABORT)
    bench.scheduler.check()
    assert request.finish_reason is FinishReason.ABORT and request.pages == []
    for plan in plans:
        bench.commit(plan)
    bench.run()
    assert other.output_token_ids == [TOKEN] * 4 and bench.pool.num_owned == 0


def test_a_full_hit_computes_the_last_token_alone_and_writes_nothing():
    bench = Bench(page_size=4)
    prompt = list(range(8))
    bench.add(prompt, max_tokens=1)
    bench.run()
    request = bench.add(prompt, max_tokens=2)
    (row,) = bench.step().rows
    assert (row.start, row.num_tokens, row.is_sampled) == (7, 1, True)
    assert request.prefix.shared_len == 8, "the recomputed token is not stored in the shared page"
    assert bench.scheduler.num_shared_tokens == 7


def test_a_partial_hit_starts_at_the_first_page_that_is_not_cached():
    bench = Bench(page_size=4)
    bench.add(list(range(10)), max_tokens=1)
    bench.run()
    request = bench.add([*range(8), 50, 51, 52], max_tokens=2)
    (row,) = bench.step().rows
    assert (row.start, row.num_tokens) == (8, 3) and request.prefix.shared_len == 8


def test_a_prompt_shares_pages_with_one_that_still_runs():
    bench = Bench(page_size=4)
    first = bench.add(list(range(9)), max_tokens=8)
    bench.step()
    second = bench.add(list(range(9)), max_tokens=8)
    bench.step()
    assert second.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    assert [bench.pool.num_references(page) for page in first.pages[:2]] == [2, 2]
    bench.scheduler.finish(first, FinishReason.ABORT)
    assert bench.pool.num_references(second.pages[0]) == 1
    bench.run()


def test_outputs_are_cached_like_prompts():
    bench = Bench(page_size=4)
    bench.add([1, 2], max_tokens=8)
    bench.run()
    request = bench.add([1, 2, *[TOKEN] * 7, 3], max_tokens=2)
    bench.step()
    assert request.prefix.shared_len == 8, "nine tokens were computed, two pages are full"


def test_salts_share_nothing_and_neither_do_requests_without_a_root():
    bench = Bench(page_size=4)
    prompt = list(range(9))
    bench.add(prompt, max_tokens=1, root=None)
    bench.run()
    assert bench.pool.num_cached == 0
    for root in (ROOT, root_key("salt", "model", "float32"), None):
        request = bench.add(prompt, max_tokens=2, root=root)
        bench.step()
        assert request.slot is not None and request.prefix.shared_len == 0
    again = bench.add(prompt, max_tokens=2)
    bench.step()
    assert again.prefix.shared_len == 8


def test_only_pages_that_are_full_computed_and_read_are_cached():
    bench = Bench(page_size=4, budget=6)
    request = bench.add(7, max_tokens=8)
    plan = bench.plan()  # six of seven computed
    assert request.prefix.keys == []  # nothing has been read back
    bench.commit(plan)
    assert len(request.prefix.keys) == 1
    ahead = [bench.plan(), bench.plan()]  # computed 7, 8: the eighth token is not known yet
    bench.scheduler.register_pages(request)
    assert len(request.prefix.keys) == 1 and request.computed_len == 8
    bench.commit(ahead[0])
    assert len(request.prefix.keys) == 2


@pytest.mark.parametrize("prompt_len", range(2, 10))
def test_a_cached_prompt_that_wants_no_output_still_has_one_token_to_compute(prompt_len):
    bench = Bench(page_size=2)
    bench.add(list(range(10)), max_tokens=1)
    bench.run()
    request = bench.add(list(range(prompt_len)), max_tokens=0)
    (row,) = bench.plan().rows
    assert row.num_tokens >= 1 and row.end == prompt_len - 1 and not row.is_sampled
    assert request.extend_len == 0


def test_static_batches_run_until_their_last_one_ends():
    bench = Bench(budget=64, rows=3, policy="static")
    lengths = [1, 2, 6, 1, 3, 1, 1]
    for length in lengths:
        bench.add(2, max_tokens=length)
    batches = []
    for plan in bench.plans():
        if plan.admitted:
            batches.append(ids(plan.admitted))
            assert len(plan.rows) == len(plan.admitted), "joined a batch that runs"
    assert batches == [["r0", "r1", "r2"], ["r3", "r4", "r5"], ["r6"]]


def test_a_static_batch_that_has_begun_takes_no_latecomer():
    bench = Bench(budget=64, rows=3, policy="static")
    bench.add(2, max_tokens=4)
    bench.step()
    bench.add(2, max_tokens=4)
    assert [len(plan.admitted) for plan in bench.plans()].index(1) == 3


def test_priority_decides_who_joins_first():
    bench = Bench(budget=64, rows=1, policy="priority")
    for priority in (2, 0, 1, 0):
        bench.add(2, max_tokens=1, priority=priority)
    joined = [ids(plan.admitted) for plan in bench.plans()]
    assert joined == [["r1"], ["r3"], ["r2"], ["r0"]]


def test_check_notices_a_leaked_page_and_a_slot_used_twice():
    bench = Bench()
    request, other = bench.add(4), bench.add(4)
    bench.step()
    page = request.pages.pop()
    with pytest.raises(AssertionError):
        bench.scheduler.check()
    request.pages.append(page)
    bench.scheduler.check()
    other.slot = request.slot
    with pytest.raises(AssertionError, match="slot"):
        bench.scheduler.check()
