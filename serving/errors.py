"""The errors of requests: one list of kinds for HTTP and gRPC.

Each protocol translates the kind into its own code (`grpc_status`, `http_status`) and passes the
text on. Any other exception is a defect of the server, and reaches the client as INTERNAL without
its text.
"""

from __future__ import annotations

import enum


class ErrorKind(enum.Enum):
    """Each value is (gRPC status name, HTTP status, OpenAI's `type`)."""

    INVALID = ("INVALID_ARGUMENT", 400, "invalid_request_error")
    WRONG_MODEL = (
        "FAILED_PRECONDITION",
        400,
        "wrong_model_error",
    )  # a request to generate to an encoder, or the reverse
    UNAUTHENTICATED = ("UNAUTHENTICATED", 401, "authentication_error")
    NOT_FOUND = ("NOT_FOUND", 404, "not_found_error")
    TOO_LARGE = ("RESOURCE_EXHAUSTED", 413, "invalid_request_error")
    IN_USE = ("ALREADY_EXISTS", 409, "conflict_error")
    CANCELLED = ("CANCELLED", 499, "request_cancelled")
    OVERLOADED = ("RESOURCE_EXHAUSTED", 429, "rate_limit_error")
    SLOW_READER = ("ABORTED", 408, "slow_reader_error")
    DEADLINE = ("DEADLINE_EXCEEDED", 408, "timeout_error")
    UNAVAILABLE = ("UNAVAILABLE", 503, "service_unavailable_error")
    INTERNAL = ("INTERNAL", 500, "server_error")

    @property
    def grpc_status(self) -> str:
        """The name of a member of `grpc.StatusCode`."""
        return self.value[0]

    @property
    def http_status(self) -> int:
        return self.value[1]

    @property
    def openai_type(self) -> str:
        return self.value[2]


class ServiceError(Exception):
    """A request that is refused or fails; the text names the value, the limit and the way out.

    `field` names the input at fault, if there is one. `retry_after_s` is the time after which
    a retry makes sense.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
