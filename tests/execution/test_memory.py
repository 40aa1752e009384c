"""The memory plan: how many pages, from which figure, and the refusal of too few."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxinfer.execution.memory
from jaxinfer.config import CacheConfig
from jaxinfer.execution.memory import MemoryPlan, device_limit, free_host_bytes, plan_pages
from jaxinfer.options import ConfigError

PLENTY = 10**9  # tokens that all rows together could use


def plan(cache: CacheConfig, **changes) -> MemoryPlan:
    figures = {
        "weight_bytes": 1_000,
        "temporary_bytes": 500,
        "page_bytes": 100,
        "min_tokens": 2,
        "max_tokens": PLENTY,
        "limit": None,
    }
    return plan_pages(cache, **(figures | changes))


@pytest.fixture
def host_of_10_000_bytes(monkeypatch):
    monkeypatch.setattr(jaxinfer.execution.memory, "free_host_bytes", lambda: 10_000)


def test_a_number_of_pages_wins_over_everything_else():
    cache = CacheConfig(page_size=4, num_pages=7, memory_bytes=10_000)
    found = plan(cache, limit=10**6, max_tokens=4)
    assert (found.num_pages, found.source) == (7, "cache.num_pages")


def test_bytes_hold_whole_pages():
    for num_bytes, num_pages in ((100, 1), (199, 1), (200, 2)):
        found = plan(CacheConfig(page_size=4, memory_bytes=num_bytes), limit=10**6)
        assert (found.num_pages, found.source) == (num_pages, "cache.memory_bytes")


def test_a_device_gives_nine_tenths_of_what_weights_and_temporaries_leave():
    found = plan(CacheConfig(page_size=4), limit=11_500)
    assert found.num_pages == 90  # (11,500 - 1,500) x 0.9 / 100
    assert "11,500" in found.source
    larger_model = plan(CacheConfig(page_size=4), limit=11_500, weight_bytes=6_000)
    assert larger_model.num_pages == 45


def test_a_host_gives_a_fraction_of_its_free_memory(host_of_10_000_bytes):
    for fraction, num_pages in ((0.2, 20), (0.5, 50), (1, 100)):
        found = plan(CacheConfig(page_size=4, memory_fraction=fraction))
        assert found.num_pages == num_pages
        assert f"{fraction:.0%}" in found.source and "10,000" in found.source


@pytest.mark.parametrize(("fraction", "num_pages"), [(None, 90), (0.5, 50), (1.0, 100), (0, 0)])
def test_memory_fraction_is_a_share_of_what_an_accelerator_has_left(fraction, num_pages):
    cache = CacheConfig(page_size=4, memory_fraction=fraction)
    figures = {"limit": 11_500, "weight_bytes": 1_000, "temporary_bytes": 500, "page_bytes": 100}
    if not num_pages:
        with pytest.raises(ConfigError, match=r"\(0 % of what weights and temporaries leave"):
            plan(cache, **figures)
        return
    found = plan(cache, **figures)
    assert found.num_pages == num_pages
    assert found.source.startswith(f"{(fraction or 0.9) * 100:g} % of what weights")


@pytest.mark.parametrize("limit", [None, 11_500])
def test_no_more_pages_than_all_rows_at_full_length_can_use(host_of_10_000_bytes, limit):
    cache = CacheConfig(page_size=4)
    assert plan(cache, limit=limit, max_tokens=32).num_pages == 8
    assert plan(cache, limit=limit, max_tokens=33).num_pages == 9


@pytest.mark.parametrize(
    ("cache", "figures", "parts"),
    [
        (CacheConfig(page_size=4, num_pages=2), {}, ["2 pages of 4", "(cache.num_pages)"]),
        (CacheConfig(page_size=4, memory_bytes=250), {}, ["2 pages of 4", "(cache.memory_bytes)"]),
        (CacheConfig(page_size=4), {"limit": 1_700}, ["1 pages of 4", "1,700 bytes"]),
        (CacheConfig(page_size=4), {"limit": 400}, ["0 pages of 4", "400 bytes"]),
        (CacheConfig(page_size=4, memory_fraction=0), {}, ["0 pages of 4", "0% of the host's"]),
    ],
)
def test_too_few_pages_for_one_request_are_refused_with_the_numbers(cache, figures, parts):
    with pytest.raises(ConfigError) as caught:
        plan(cache, min_tokens=9, **figures)
    for part in [*parts, "one request of 9 tokens", "set cache.num_pages or cache.memory_bytes"]:
        assert part in str(caught.value)


def test_exactly_enough_pages_are_enough():
    assert plan(CacheConfig(page_size=4, num_pages=2), min_tokens=8).num_tokens == 8


@given(
    page_size=st.integers(1, 300),
    page_bytes=st.integers(1, 10**6),
    limit=st.integers(0, 10**10),
    weight_bytes=st.integers(0, 10**10),
    max_tokens=st.integers(2, 10**6),
)
def test_what_is_planned_fits_the_device(page_size, page_bytes, limit, weight_bytes, max_tokens):
    try:
        found = plan(
            CacheConfig(page_size=page_size),
            page_bytes=page_bytes,
            limit=limit,
            weight_bytes=weight_bytes,
            max_tokens=max_tokens,
        )
    except ConfigError:
        left = limit - weight_bytes - 500
        assert left * 0.9 < page_bytes * -(-2 // page_size)
        return
    assert found.num_tokens >= 2
    assert found.cache_bytes + found.weight_bytes + found.temporary_bytes <= limit
    assert found.num_tokens < max_tokens + page_size


def test_a_plan_adds_up():
    found = MemoryPlan(1, 2, page_bytes=30, num_pages=4, page_size=5, source="here")
    assert (found.cache_bytes, found.num_tokens) == (120, 20)


@pytest.mark.parametrize(
    ("stats", "limit"),
    [(None, None), ({}, None), ({"bytes_in_use": 5}, None), ({"bytes_limit": 7}, 7)],
)
def test_a_device_that_does_not_tell_its_memory_has_no_limit(stats, limit):
    device = SimpleNamespace(memory_stats=lambda: stats)
    assert device_limit(device) == limit  # type: ignore[arg-type]


def test_free_host_memory_is_a_plausible_figure():
    assert 2**20 < free_host_bytes() < 2**50


def test_without_proc_the_total_memory_stands_in(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr("builtins.open", missing)
    assert 2**20 < free_host_bytes() < 2**50
