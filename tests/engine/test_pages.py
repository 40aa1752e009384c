"""The page pool: three states, chained keys, least recently used first, heads after tails."""

import random

import pytest

import jaxinfer.engine.pages
from jaxinfer.engine.pages import PagePool, page_key, root_key

ROOT = root_key("", "model", "float32")


def fill(pool: PagePool, token_ids, root=ROOT) -> list[int]:
    """Own pages that hold `token_ids`, known to the prefix cache, as a computed request would."""
    pages = pool.allocate(len(token_ids) // pool.page_size)
    assert pages is not None
    key = root
    for index, page in enumerate(pages):
        of_page = token_ids[index * pool.page_size : (index + 1) * pool.page_size]
        key = page_key(key, of_page)
        pool.register(page, key, of_page)
    return pages


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check()
    assert pool.num_free + pool.num_cached + pool.num_owned == pool.num_pages
    assert pool.num_available == pool.num_free + pool.num_cached
    return pool.num_free, pool.num_cached, pool.num_owned


def shared(pool: PagePool, token_ids, root=ROOT) -> list[int]:
    """The pages a prompt would hit; given back at once."""
    pages, keys = pool.match_prefix(root, token_ids)
    assert len(pages) == len(keys)
    pool.release(pages)
    return pages


def test_every_page_is_in_one_state_all_along():
    pool = PagePool(4, 2)
    assert counts(pool) == (4, 0, 0)
    pages = fill(pool, [1, 2, 3, 4])
    assert counts(pool) == (2, 0, 2)
    more = pool.allocate(1) or []
    assert counts(pool) == (1, 0, 3)
    pool.release(pages)  # their content is known
    assert counts(pool) == (1, 2, 1)
    pool.release(more)  # its content is not
    assert counts(pool) == (2, 2, 0)
    pool.forget_all()
    assert counts(pool) == (4, 0, 0)


def test_allocate_gives_distinct_pages_or_changes_nothing():
    pool = PagePool(3, 4)
    first = pool.allocate(2)
    assert first is not None and len(set(first)) == 2
    assert pool.allocate(2) is None
    assert counts(pool) == (1, 0, 2)
    last = pool.allocate(1)
    assert last is not None and sorted(first + last) == [0, 1, 2]
    assert pool.allocate(0) == [] and pool.allocate(1) is None


def test_pages_for_rounds_up():
    pool = PagePool(1, 4)
    assert [pool.pages_for(n) for n in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]


def test_a_prompt_shares_its_longest_known_prefix_of_whole_pages():
    pool = PagePool(8, 2)
    pages = fill(pool, [1, 2, 3, 4, 5, 6])
    assert shared(pool, [1, 2, 3, 4, 5, 6]) == pages
    assert shared(pool, [1, 2, 3, 4, 5, 6, 7]) == pages
    assert shared(pool, [1, 2, 3, 4, 5]) == pages[:2]
    assert shared(pool, [1, 2, 3, 9, 5, 6]) == pages[:1]
    assert shared(pool, [1]) == shared(pool, []) == shared(pool, [2, 1]) == []


def test_the_same_tokens_behind_another_prefix_are_another_page():
    pool = PagePool(8, 2)
    fill(pool, [1, 2, 7, 7])
    assert shared(pool, [7, 7]) == []
    assert len(shared(pool, [1, 2, 7, 7, 7, 7])) == 2


def test_sharing_counts_references_and_releasing_takes_as_many():
    pool = PagePool(4, 2)
    pages = fill(pool, [1, 2])
    again, _ = pool.match_prefix(ROOT, [1, 2])
    assert again == pages and pool.num_references(pages[0]) == 2
    pool.release(pages)
    assert counts(pool) == (3, 0, 1)
    pool.release(again)
    assert counts(pool) == (3, 1, 0)
    with pytest.raises(AssertionError, match="released more often than owned"):
        pool.release(again)


def test_roots_keep_salts_models_and_cache_types_apart():
    roots = {
        root_key("", "model", "float32"),
        root_key("salt", "model", "float32"),
        root_key("", "other", "float32"),
        root_key("", "model", "bfloat16"),
        root_key("model", "", "float32"),
        root_key("", "", "modelfloat32"),
    }
    assert len(roots) == 6
    pool = PagePool(8, 2)
    fill(pool, [1, 2, 3, 4])
    assert all(shared(pool, [1, 2, 3, 4], root) == [] for root in roots - {ROOT})


def test_page_keys_depend_on_parent_order_and_every_id():
    keys = {
        page_key(ROOT, [1, 2]),
        page_key(ROOT, [2, 1]),
        page_key(ROOT, [1, 3]),
        page_key(ROOT, [1, 2, 0]),
        page_key(page_key(ROOT, [1, 2]), [1, 2]),
    }
    assert len(keys) == 5
    assert page_key(ROOT, [1, 2]) == page_key(ROOT, (1, 2))


def test_a_digest_that_collides_does_not_serve_other_tokens(monkeypatch):
    constant = lambda parent, token_ids: b"the same for all"
    monkeypatch.setattr(jaxinfer.engine.pages, "page_key", constant)
    pool = PagePool(4, 2)
    (page,) = pool.allocate(1) or []
    pool.register(page, constant(ROOT, [1, 2]), [1, 2])
    assert shared(pool, [1, 2]) == [page]
    assert shared(pool, [1, 3]) == [] and shared(pool, [3, 4]) == []


def test_free_pages_go_first_then_the_least_recently_used():
    pool = PagePool(4, 2)
    first, second, third = (fill(pool, [i, i]) for i in (1, 2, 3))
    for pages in (second, first, third):
        pool.release(pages)
    shared(pool, [2, 2])  # used again: now the latest
    assert counts(pool) == (1, 3, 0)
    pool.allocate(1)
    assert counts(pool) == (0, 3, 1)
    assert [pool.allocate(1) for _ in range(3)] == [first, third, second]
    assert shared(pool, [1, 1]) == shared(pool, [2, 2]) == shared(pool, [3, 3]) == []


def test_a_prompts_head_outlives_its_tail():
    pool = PagePool(4, 1)
    pool.release(fill(pool, [1, 2, 3, 4]))
    for left in (3, 2, 1, 0):
        pool.allocate(1)
        assert len(shared(pool, [1, 2, 3, 4])) == left
        counts(pool)


def test_owned_pages_are_never_given_up():
    pool = PagePool(3, 1)
    pages = fill(pool, [1, 2])
    pool.release(pages)
    held, _ = pool.match_prefix(ROOT, [1])  # the head, back in use
    assert pool.allocate(3) is None
    taken = pool.allocate(2)
    assert taken is not None and held[0] not in taken
    assert shared(pool, [1, 2]) == held


def test_of_two_pages_with_the_same_content_the_first_is_known():
    pool = PagePool(4, 2)
    first, second = fill(pool, [1, 2]), fill(pool, [1, 2])
    assert first != second and shared(pool, [1, 2]) == first
    pool.release(second)
    assert counts(pool) == (3, 0, 1)  # a copy is worth nothing
    pool.release(first)
    assert counts(pool) == (3, 1, 0)


def test_a_page_is_registered_by_an_owner_and_once():
    pool = PagePool(2, 2)
    with pytest.raises(AssertionError, match="registered without an owner"):
        pool.register(0, page_key(ROOT, [1, 2]), [1, 2])
    (page,) = fill(pool, [1, 2])
    pool.register(page, page_key(ROOT, [3, 4]), [3, 4])
    assert shared(pool, [1, 2]) == [page] and shared(pool, [3, 4]) == []


def test_without_a_prefix_cache_nothing_is_ever_cached():
    pool = PagePool(4, 2, prefix_cache=False)
    pages = fill(pool, [1, 2, 3, 4])
    assert shared(pool, [1, 2, 3, 4]) == []
    pool.release(pages)
    assert counts(pool) == (4, 0, 0)


def test_forgetting_all_leaves_owners_their_pages_and_shares_them_no_more():
    pool = PagePool(4, 2)
    kept, cached = fill(pool, [1, 2]), fill(pool, [3, 4])
    pool.release(cached)
    pool.forget_all()
    assert counts(pool) == (3, 0, 1)
    assert shared(pool, [1, 2]) == shared(pool, [3, 4]) == []
    pool.release(kept)
    assert counts(pool) == (4, 0, 0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.popleft(),
        lambda pool: pool._references.__setitem__(pool._free[0], 1),
        lambda pool: pool._references.__setitem__(pool._free[0], -1),
        lambda pool: pool._idle.__setitem__(pool._free[0], None),
        lambda pool: pool._by_key.clear(),
        lambda pool: pool._content.clear(),
    ],
)
def test_check_notices_damage(damage):
    pool = PagePool(4, 2)
    pool.release(fill(pool, [1, 2]))
    fill(pool, [3, 4])
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_asking_for_a_prefix_neither_takes_nor_uses_its_pages():
    pool = PagePool(2, 2)
    for tokens in ([1, 2], [3, 4]):
        pool.release(fill(pool, tokens))
    before = counts(pool)
    assert pool.num_cached_prefix(ROOT, [1, 2, 9]) == 2
    assert pool.num_cached_prefix(ROOT, [9, 1, 2]) == 0
    assert counts(pool) == before
    pool.allocate(1)  # the page least recently used is still the one asked for
    assert pool.num_cached_prefix(ROOT, [1, 2]) == 0 and pool.num_cached_prefix(ROOT, [3, 4]) == 2
    assert PagePool(2, 2, prefix_cache=False).num_cached_prefix(ROOT, [1, 2]) == 0


def test_random_use_agrees_with_a_model_of_the_cache():
    rng = random.Random(0)
    for _ in range(200):
        size = rng.choice([1, 2, 3])
        pool = PagePool(rng.randint(1, 8), size)
        written: dict[int, tuple[int, ...]] = {}  # page -> every token up to its end
        owned: list[tuple[list[int], list[int]]] = []
        for _ in range(40):
            if owned and rng.random() < 0.5:
                pages, _ = owned.pop(rng.randrange(len(owned)))
                pool.release(pages)
            else:
                tokens = [rng.randint(0, 1) for _ in range(size * rng.randint(1, 4))]
                num_known = pool.num_cached_prefix(ROOT, tokens)
                pages, keys = pool.match_prefix(ROOT, tokens)
                assert num_known == len(pages) * size
                for index, page in enumerate(pages):
                    assert written[page] == tuple(tokens[: (index + 1) * size])
                new = pool.allocate(len(tokens) // size - len(pages))
                if new is None:
                    pool.release(pages)
                else:
                    for page in new:
                        index = len(pages)
                        of_page = tokens[index * size : (index + 1) * size]
                        keys.append(page_key(keys[-1] if keys else ROOT, of_page))
                        written[page] = tuple(tokens[: (index + 1) * size])
                        pool.register(page, keys[-1], of_page)
                        pages.append(page)
                    owned.append((pages, tokens))
            counts(pool)
            held = [page for pages, _ in owned for page in pages]
            assert pool.num_owned == len(set(held))
