"""A scheduler on the bench: requests go in, and every sampled token is the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxinfer.engine.pages import PagePool, root_key
from jaxinfer.engine.policies import POLICIES
from jaxinfer.engine.request import FinishReason, Rank, Request
from jaxinfer.engine.scheduler import Plan, Scheduler
from jaxinfer.sampling.params import SamplingParams

ROOT = root_key("", "model", "float32")
TOKEN = 7  # what every row samples


class Bench:
    """A scheduler, and requests whose every sampled token is `TOKEN`."""

    def __init__(
        self, num_pages=64, page_size=4, budget=16, rows=8, policy="first_come", num_stages=1
    ):
        self.pool = PagePool(num_pages, page_size)
        self.scheduler = Scheduler(
            self.pool,
            POLICIES[policy](rows),
            max_num_batched_tokens=budget,
            max_num_seqs=rows,
            num_stages=num_stages,
        )
        self.num_added = 0

    def add(
        self,
        prompt: int | Sequence[int],
        max_tokens=8,
        *,
        priority=0,
        root: bytes | None = ROOT,
    ) -> Request:
        """A request with that prompt, or with that many tokens like nobody else's."""
        if isinstance(prompt, int):
            prompt = [1000 * self.num_added + i for i in range(1, prompt + 1)]
        request = Request(
            f"r{self.num_added}",
            prompt,
            SamplingParams(),
            max_len=len(prompt) + max_tokens,
            rank=Rank(priority, self.num_added),
            cache_root=root,
        )
        self.num_added += 1
        self.scheduler.add(request)
        return request

    def plan(self) -> Plan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        return plan

    def commit(self, plan: Plan) -> None:
        for row in plan.rows:
            request = row.request
            if request.is_finished:
                continue
            if row.is_sampled:
                request.read(TOKEN)
            self.scheduler.register_pages(request)
            if request.is_full:
                self.scheduler.finish(request, FinishReason.LENGTH)
        self.scheduler.check()

    def step(self) -> Plan:
        plan = self.plan()
        self.commit(plan)
        return plan

    def plans(self) -> Iterator[Plan]:
        """Steps to the end, which has to come."""
        for _ in range(1000):
            if not self.scheduler.has_requests:
                return
            yield self.step()
        raise AssertionError("still running after 1,000 steps")

    def run(self) -> None:
        for _ in self.plans():
            pass


def sizes(plan: Plan) -> dict[str, int]:
    return {row.request.id: row.num_tokens for row in plan.rows}


def ids(requests: Sequence[Request]) -> list[str]:
    return [request.id for request in requests]
