"""Reads a request's body as strict JSON, within limits of size and nesting.

The following is refused, each with its own message: a content type other than JSON (which also
keeps web pages of other origins from posting here unasked), more than `max_body_bytes` (counted on
arrival, whatever the client announced), text that is not UTF-8, brackets nested deeper than
`max_nesting`, NaN and Infinity (which Python would read, but JSON does not have), a duplicate key
in an object (its meaning is ambiguous), and lone surrogates (they cannot be encoded again).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError

MAX_EXACT = 2**53  # every integer up to here is a float
LARGE_BODY = 256 * 1024  # bytes; larger ones are parsed in another thread

# A string, to its end or that of the body. Possessive quantifiers: no input causes backtracking.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB-Fc-f]")


async def read_json(request: Request, limits: LimitsConfig) -> dict[str, Any]:
    """The JSON object in a request's body; raises `ServiceError`, or `HTTPException` for a 415."""
    _check_content_type(request)
    body = await _read(request, limits)
    if len(body) > LARGE_BODY:
        return await asyncio.to_thread(parse_json, body, limits.max_nesting)
    return parse_json(body, limits.max_nesting)


def parse_json(body: bytes, max_nesting: int) -> dict[str, Any]:
    """Parse a JSON object strictly; raises `ServiceError`."""
    depth = nesting(body)
    if depth > max_nesting:
        raise _invalid(
            f"the body nests brackets {depth} deep; serving.limits.max_nesting is {max_nesting}"
        )
    try:
        text = body.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_number,
        )
        if _HALF_PAIR.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise _invalid("the body holds a lone surrogate (half of a \\u pair)") from error
    except ValueError as error:
        raise _invalid(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _invalid(f"the body is a JSON {_json_type(value)}; it must be an object")
    return value


def nesting(body: bytes) -> int:
    """How deep brackets nest outside strings, counted without parsing."""
    marks = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
    return max(itertools.accumulate(map(_STEPS.__getitem__, marks)), default=0)


async def _read(request: Request, limits: LimitsConfig) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limits.max_body_bytes:
        raise _too_large(int(announced), limits.max_body_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(limits.send_timeout_s or None):
                message = await request.receive()
        except TimeoutError as error:
            text = f"no byte of the body arrived for {limits.send_timeout_s} s"
            raise ServiceError(ErrorKind.DEADLINE, text) from error
        if message["type"] == "http.disconnect":
            raise ServiceError(
                ErrorKind.CANCELLED, "the client disconnected before its request was complete"
            )
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limits.max_body_bytes:
            raise _too_large(size, limits.max_body_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        text = f"the body's content type is {kind or 'not given'!r}; send application/json"
        raise HTTPException(415, text)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPException(415, f"the body's encoding is {encoding!r}; send it without one")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {again!r} occurs twice in one object")
    return value


def _number(text: str) -> int | float:
    """JSON has one kind of number: 2.0 is an integer just as 2 is."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= MAX_EXACT else value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _invalid(text: str) -> ServiceError:
    return ServiceError(ErrorKind.INVALID, text)


def _too_large(size: int, limit: int) -> ServiceError:
    text = f"the body has {size} bytes or more; serving.limits.max_body_bytes is {limit}"
    return ServiceError(ErrorKind.TOO_LARGE, text)


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
