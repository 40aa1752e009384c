"""Converts a `ServiceError` to a gRPC status: code, text and trailing metadata.

field         the input at fault; also in google.rpc.BadRequest
retry-after   seconds; also in google.rpc.RetryInfo
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from jaxinfer.serving.errors import ServiceError

DETAILS_KEY = "grpc-status-details-bin"
FIELD_KEY = "field"
RETRY_AFTER_KEY = "retry-after"
# Status and metadata are sent as headers, of which receivers accept 8 KiB (gRPC's default). They
# contain the text three times: percent-encoded (up to 3 bytes a byte) and twice in base64.
MAX_TEXT_BYTES = 1000


async def abort(context: grpc.aio.ServicerContext, error: ServiceError) -> NoReturn:
    """End a call with `error`; never returns, since `context.abort` raises."""
    code = grpc.StatusCode[error.kind.grpc_status]
    text = _truncate(error.message)
    await context.abort(code, text, _trailing_metadata(code, text, error))
    raise AssertionError("abort returned")


def _truncate(text: str) -> str:
    data = text.encode("utf-8", "replace")
    return data[:MAX_TEXT_BYTES].decode("utf-8", "ignore") + (
        "..." if len(data) > MAX_TEXT_BYTES else ""
    )


def _trailing_metadata(
    code: grpc.StatusCode, text: str, error: ServiceError
) -> tuple[tuple[str, str | bytes], ...]:
    plain: list[tuple[str, str | bytes]] = []
    number: Any = code.value[0]
    status = status_pb2.Status(code=number, message=text)
    if error.field is not None:
        plain.append((FIELD_KEY, error.field))
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        plain.append((RETRY_AFTER_KEY, f"{math.ceil(error.retry_after_s)}"))
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if not plain:
        return ()
    return (*plain, (DETAILS_KEY, status.SerializeToString()))
