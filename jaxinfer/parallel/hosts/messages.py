"""The channel's wire format: an operation, and numpy arrays or text as its payload. No pickle.

frame   length u32 | operation u8 | payload            (length counts operation and payload)
call    number i64 | arrays, each: len(dtype) u8 | dtype | rank u8 | dimensions u32 | bytes
text    UTF-8, or JSON in UTF-8
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_FRAME_BYTES = 2**28  # a larger length was not written by this program
_HEAD = struct.Struct("<IB")
_NUMBER = struct.Struct("<q")  # 100 steps a second overflow 32 bits within eight months


class Op(enum.IntEnum):
    # Program calls of process 0, which the other processes repeat.
    STEP = 1  # number: the bucket
    ADMIT = 2
    EXTRAS = 3  # number: the slot
    RESET = 4
    # Sent by process 0.
    CHECK = 16  # number: steps so far; array: the hash over all calls
    STOP = 17  # this engine makes no more calls
    START = 18  # all processes have joined
    AGREED = 19  # JSON: the result of AGREE
    GO = 20  # all processes are ready
    # Sent by every process.
    HEARTBEAT = 32
    BYE = 33  # the sender leaves in good order
    FAILED = 34  # text: why the sender ends, and why the receiver must
    # Sent to process 0.
    HELLO = 48  # JSON: the sender's number, the number of processes, the facts to compare
    AGREE = 49  # JSON: the model and options that the sender is about to run
    READY = 50  # the sender's programs are compiled


CALLS = frozenset({Op.STEP, Op.ADMIT, Op.EXTRAS, Op.RESET})


class Message(NamedTuple):
    op: Op
    payload: bytes
    process_id: int  # the sender's


class Call(NamedTuple):
    op: Op
    number: int
    arrays: tuple[np.ndarray, ...]


def encode_frame(op: Op, payload: bytes = b"") -> bytes:
    return _HEAD.pack(1 + len(payload), op) + payload


def decode_frames(buffer: bytearray, process_id: int) -> list[Message]:
    """Remove the complete frames from the buffer's start and return them.

    Raises `ValueError` for bytes that are no frame.
    """
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
        dtype = array.dtype.str.encode()
        parts.append(struct.pack(f"<B{len(dtype)}sB", len(dtype), dtype, array.ndim))
        parts.append(struct.pack(f"<{array.ndim}I", *array.shape))
        parts.append(array.tobytes())
    return b"".join(parts)


def unpack_call(message: Message) -> Call:
    """Decode a call; its arrays own their memory, aligned as numpy aligns it."""
    payload, arrays = message.payload, []
    [number] = _NUMBER.unpack_from(payload)
    offset = _NUMBER.size
    while offset < len(payload):
        size = payload[offset]
        dtype = np.dtype(payload[offset + 1 : offset + 1 + size].decode())
        offset += 1 + size
        num_dims = payload[offset]
        shape = struct.unpack_from(f"<{num_dims}I", payload, offset + 1)
        offset += 1 + 4 * num_dims
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(payload, dtype, count, offset).reshape(shape).copy())
        offset += count * dtype.itemsize
    return Call(message.op, number, tuple(arrays))


def pack_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def unpack_json(payload: bytes) -> Any:
    """Decode JSON; raises `ValueError` for anything else."""
    try:
        return json.loads(payload)
    except RecursionError:
        raise ValueError(f"{len(payload):,} bytes of JSON, nested too deeply") from None
