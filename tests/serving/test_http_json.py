"""Reading of JSON bodies: what is refused, and how fast."""

from __future__ import annotations

import json
import time

import pytest

from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.http.request_body import nesting, parse_json


def refusal(body: bytes, max_nesting: int = 8) -> str:
    with pytest.raises(ServiceError) as caught:
        parse_json(body, max_nesting)
    assert caught.value.kind is ErrorKind.INVALID
    return caught.value.message


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b'{"a": 1} {}', "not valid JSON"),
        (b"[1]", "a JSON array"),
        (b'"text"', "a JSON string"),
        (b"null", "a JSON null"),
        (b"true", "a JSON boolean"),
        (b"1", "a JSON number"),
        (b'{"a": NaN}', "NaN is not"),
        (b'{"a": -Infinity}', "-Infinity is not"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (rb'{"a": "\ud800"}', "lone surrogate"),
        (rb'{"\uDFFF": 1}', "lone surrogate"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "a\nb"}', "not valid JSON"),
    ],
)
def test_invalid_json_object_is_refused_with_the_reason(body, complaint):
    assert complaint in refusal(body)


def test_valid_json_is_read_unchanged():
    value = {
        "a": [
            1,
            2.5,
            None,
            True,
            "é\ud834\udd1e".encode("utf-16", "surrogatepass").decode("utf-16"),
        ]
    }
    for is_ascii in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=is_ascii).encode(), 8) == value


def test_integral_number_is_an_integer_however_written():
    value = parse_json(b'{"a": 2.0, "b": 2.5, "c": 1e3, "d": 1e300}', 8)
    assert value == {"a": 2, "b": 2.5, "c": 1000, "d": 1e300}
    assert [type(item) for item in value.values()] == [int, float, int, float]


def test_nesting_is_counted_outside_strings():
    assert nesting(b"{}") == 1
    assert nesting(b'{"a": [[1], {"b": []}]}') == 4
    assert nesting(rb'{"[[[[": "\"[[{{\\"}') == 1
    assert nesting(b'"[[[[') == 0  # an unfinished string
    body = b'{"a": ' + b"[" * 8 + b"]" * 8 + b"}"
    assert "9 deep" in refusal(body)
    assert parse_json(body, 9) == {"a": [[[[[[[[]]]]]]]]}


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 2_000_000,
        b"{}" * 1_000_000,
        b'"' + rb"\"" * 1_000_000,
        b'"' * 1_999_999,
        b'"\\' * 1_000_000,
    ],
)
def test_hostile_bodies_are_refused_in_linear_time(body):
    start = time.perf_counter()
    refusal(body)
    assert time.perf_counter() - start < 5  # measured: below 0.3 s; quadratic would be hours
