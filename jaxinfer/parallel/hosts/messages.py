"""What goes over the channel: an operation, a number, and numpy arrays or a text. No pickle.

frame   length u32 | operation u8 | payload            (length: of operation and payload)
call    number i64 | arrays, each: len(type) u8 | type | dimensions u8 | u32 each | its bytes
text    UTF-8, or JSON in UTF-8
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_FRAME_BYTES = 2**28  # a larger claim comes from no process of ours
_HEAD = struct.Struct("<IB")
_NUMBER = struct.Struct("<q")  # a server of 100 steps a second counts 2**31 in eight months


class Op(enum.IntEnum):
    # Calls, which process 0 makes and the others repeat.
    STEP = 1  # number: its bucket
    ADMIT = 2
    EXTRAS = 3  # number: the slot
    RESET = 4
    # From process 0.
    CHECK = 16  # number: steps so far; the hash over all calls
    STOP = 17  # no more calls to this engine
    START = 18  # all have joined
    AGREED = 19  # JSON: what came of AGREE
    GO = 20  # all are ready
    # From all.
    BEAT = 32  # I am here
    BYE = 33  # I leave, and all is well
    FAILED = 34  # text: why I end, and you have to
    # To process 0.
    HELLO = 48  # JSON: who I am
    AGREE = 49  # JSON: what I am about to run
    READY = 50  # my programs are compiled


CALLS = frozenset({Op.STEP, Op.ADMIT, Op.EXTRAS, Op.RESET})


class Message(NamedTuple):
    op: Op
    payload: bytes
    process_id: int  # of the sender


class Call(NamedTuple):
    op: Op
    number: int
    arrays: tuple[np.ndarray, ...]


def frame(op: Op, payload: bytes = b"") -> bytes:
    return _HEAD.pack(1 + len(payload), op) + payload


def take_frames(buffer: bytearray, process_id: int) -> list[Message]:
    """The whole frames at the buffer's start, which it loses; `ValueError` for no frame of ours."""
    messages = []
    while len(buffer) >= _HEAD.size:
        length, op = _HEAD.unpack_from(buffer)
        if not 1 <= length <= MAX_FRAME_BYTES or op not in Op._value2member_map_:
            raise ValueError(f"a frame of {length:,} bytes, operation {op}")
        end = _HEAD.size - 1 + length
        if len(buffer) < end:
            break
        messages.append(Message(Op(op), bytes(buffer[_HEAD.size : end]), process_id))
        del buffer[:end]
    return messages


def pack_call(number: int, arrays: Sequence[np.ndarray]) -> bytes:
    parts = [_NUMBER.pack(number)]
    for array in arrays:
        kind = array.dtype.str.encode()
        parts.append(struct.pack(f"<B{len(kind)}sB", len(kind), kind, array.ndim))
        parts.append(struct.pack(f"<{array.ndim}I", *array.shape))
        parts.append(array.tobytes())
    return b"".join(parts)


def unpack_call(message: Message) -> Call:
    """Arrays of their own, aligned as numpy aligns them."""
    payload, arrays = message.payload, []
    [number] = _NUMBER.unpack_from(payload)
    at = _NUMBER.size
    while at < len(payload):
        size = payload[at]
        kind = np.dtype(payload[at + 1 : at + 1 + size].decode())
        at += 1 + size
        num_dims = payload[at]
        shape = struct.unpack_from(f"<{num_dims}I", payload, at + 1)
        at += 1 + 4 * num_dims
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(payload, kind, count, at).reshape(shape).copy())
        at += count * kind.itemsize
    return Call(message.op, number, tuple(arrays))


def pack_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def unpack_json(payload: bytes) -> Any:
    """`ValueError` for what is no JSON."""
    try:
        return json.loads(payload)
    except RecursionError:
        raise ValueError(f"{len(payload):,} bytes of JSON, nested too deeply") from None
