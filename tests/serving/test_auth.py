"""API keys: the file format, and which tokens are accepted."""

from __future__ import annotations

import hmac

import pytest

from jaxinfer.options import ConfigError
from jaxinfer.serving.auth import ApiKeys, bearer_token


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.txt"

    def write(text: str | bytes):
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_known_key_has_a_name_and_unknown_key_has_none(keys_file):
    text = "# ours\n\nalice:sk-alice-1\n  bob : sk-bob:with:colons \nbare-key-0\r\n"
    keys = ApiKeys.from_file(keys_file(text))
    assert len(keys) == 3
    assert keys.name_of("sk-alice-1") == "alice"
    assert keys.name_of("sk-bob:with:colons") == "bob"
    assert keys.name_of("bare-key-0") == "line-5"
    for wrong in (None, "", "sk-alice-", "sk-alice-12", "SK-ALICE-1", "alice", "# ours", "\udcff"):
        assert keys.name_of(wrong) is None


def test_every_key_is_compared_whichever_matches(monkeypatch):
    keys = ApiKeys([("a", "first-key"), ("b", "second-key"), ("c", "third-key")])
    compared = []

    def compare(known, given):
        compared.append(known)
        return known == given

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert keys.name_of("first-key") == "a" and len(compared) == 3
    assert keys.name_of("none of them") is None and len(set(compared)) == 3


def test_keys_themselves_are_not_stored():
    keys = ApiKeys([("a", "secret-key-of-a")])
    assert "secret" not in repr(vars(keys))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no key"),
        ("# only this\n\n", "no key"),
        ("a:long-enough\nb:\n", "line 2: there is no key"),
        (":long-enough\n", "line 1: the name"),
        ("a:short\n", "line 1: the key has 5 characters"),
        ("a:two words!\n", "line 1: a key may contain"),
        ("a:schlüssel-1\n", "line 1: a key may contain"),
        ("a:long-enough\nb:long-enough\n", "line 2: the key repeats that of 'a'"),
        ("a:long-enough\na:longer-enough\n", "line 2: the name 'a' is used"),
        (b"a:\xff\xfe-long-enough\n", "cannot be read"),
    ],
)
def test_bad_key_file_is_refused_with_the_line_at_fault(keys_file, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ApiKeys.from_file(keys_file(text))


def test_key_file_problems_are_listed_together_without_keys(keys_file):
    with pytest.raises(ConfigError) as caught:
        ApiKeys.from_file(keys_file("a:secret!\nb:secret!\nc:hush\n"))
    assert "line 2" in str(caught.value) and "line 3" in str(caught.value)
    assert "secret" not in str(caught.value) and "hush" not in str(caught.value)


def test_missing_key_file_is_refused_by_its_path(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.txt"):
        ApiKeys.from_file(tmp_path / "absent.txt")


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic abc", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("abc", None),
        ("", None),
        (None, None),
    ],
)
def test_bearer_token_follows_the_scheme(header, token):
    assert bearer_token(header) == token
