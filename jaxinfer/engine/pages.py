"""The page pool: who owns which page of the KV cache, and which pages hold a known prefix.

Pure Python over integers. A page is in exactly one of three states:

    free     nobody owns it and its content is worth nothing
    cached   nobody owns it, but it holds a full page of tokens that a later prompt may begin with
    owned    one or more requests hold a reference

and free + cached + owned = total, always (`check`). A full page is known by the digest of
(the digest of the page before it, its token ids); the first digest is the request's `cache_root`,
which covers the cache salt, the model and the cache's type. On a hit the token ids are compared
as well. Cached pages are given up least recently used first, a prompt's tail before its head.
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple


def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The chained digest of a full page: 16 bytes of BLAKE2b over parent and ids."""
    return hashlib.blake2b(parent + array.array("q", token_ids).tobytes(), digest_size=16).digest()


def root_key(*parts: str) -> bytes:
    """The digest in front of a first page: salt, model, cache type."""
    return hashlib.blake2b(
        "\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


class _Content(NamedTuple):
    key: bytes
    token_ids: tuple[int, ...]


class PagePool:
    """`num_pages` pages of `page_size` tokens; without `prefix_cache` nothing is ever cached."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True):
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.reset()

    def reset(self) -> None:
        """All pages free, nothing known of their content."""
        self._free: deque[int] = deque(range(self.num_pages))
        self._references = [0] * self.num_pages
        self._content: dict[int, _Content] = {}  # page -> what it is known to hold
        self._by_key: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, oldest first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    @property
    def num_owned(self) -> int:
        return self.num_pages - len(self._free) - len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    def num_references(self, page: int) -> int:
        """How many requests own `page`."""
        return self._references[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int] | None:
        """`num_pages` pages with one reference each, or None (and no change) if there are fewer."""
        if num_pages > self.num_available:
            return None
        pages = []
        for _ in range(num_pages):
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give one reference of each page back, last page first, so that heads outlive tails."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} released more often than owned"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._content:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def match_prefix(self, root: bytes, token_ids: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """The longest run of cached or owned pages that holds a prefix of `token_ids`.

        Takes a reference of each; only full pages count. Returns the pages and their keys.
        """
        pages: list[int] = []
        keys: list[bytes] = []
        for page, key in self._known(root, token_ids):
            self._references[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
            keys.append(key)
        return pages, keys

    def num_cached_prefix(self, root: bytes, token_ids: Sequence[int]) -> int:
        """Tokens in the pages that `match_prefix` would give; nothing is taken or marked as used"""
        return self.page_size * sum(1 for _ in self._known(root, token_ids))

    def register(self, page: int, key: bytes, token_ids: Sequence[int]) -> None:
        """Declare that an owned `page` is full and holds `token_ids` behind the prefix of `key`.

        Where another page holds the same already, that one stays the known one.
        """
        assert self._references[page] > 0, f"page {page} registered without an owner"
        if self.prefix_cache and key not in self._by_key and page not in self._content:
            self._content[page] = _Content(key, tuple(token_ids))
            self._by_key[key] = page

    def forget_all(self) -> None:
        """Drop the prefix cache: cached pages become free; owned ones are shared no more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._content.clear()
        self._by_key.clear()

    def check(self) -> None:
        """Assert the pool's invariants; O(pages)."""
        free, idle = set(self._free), set(self._idle)
        owned = {page for page, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle and not free & owned and not idle & owned, "a page in two states"
        assert len(free) + len(idle) + len(owned) == self.num_pages, "pages lost"
        assert all(count >= 0 for count in self._references), "negative references"
        assert idle <= self._content.keys(), "a cached page without content"
        assert not free & self._content.keys(), "a free page with content"
        assert {c.key: page for page, c in self._content.items()} == self._by_key, "keys astray"

    def _known(self, root: bytes, token_ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """The pages, with their keys, that hold the longest known prefix."""
        if not self.prefix_cache:
            return
        B, key = self.page_size, root
        for start in range(0, len(token_ids) - B + 1, B):
            page_ids = tuple(token_ids[start : start + B])
            key = page_key(key, page_ids)
            page = self._by_key.get(key)
            if page is None or self._content[page].token_ids != page_ids:
                return
            yield page, key

    def _forget(self, page: int) -> None:
        del self._by_key[self._content.pop(page).key]
