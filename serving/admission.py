"""Admission control: how many samples, or texts of an encoder, may be unfinished at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jaxinfer import EngineLike
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError


class AdmissionQuota:
    """Counts unfinished samples, `num_used`, against the limit `capacity`.

    For the event loop's thread.
    """

    def __init__(self, engine: EngineLike, limits: LimitsConfig):
        is_encoder = not engine.can_generate
        self._limit = "max_waiting_texts" if is_encoder else "max_waiting"
        self._unit, self._field = ("texts", "input") if is_encoder else ("samples", "n")
        has_replicas = engine.config.mesh.data > 1
        self._max_running = ("mesh.data * " if has_replicas else "") + "scheduler.max_num_seqs"
        self.capacity = engine.config.max_running + getattr(limits, self._limit)
        self.num_used = 0

    def check(self, number: int) -> None:
        """Raise `ServiceError` if `number` more do not fit now, or could never fit."""
        if number > self.capacity:
            raise ServiceError(
                ErrorKind.INVALID,
                f"the request has {number} {self._unit}; this server takes {self.capacity} at once",
                field=self._field,
            )
        if self.num_used + number > self.capacity:
            raise ServiceError(
                ErrorKind.OVERLOADED,
                f"{self.num_used} {self._unit} are unfinished and {number} more were requested; "
                f"at most {self.capacity} may be ({self._max_running} + "
                f"serving.limits.{self._limit}); try again later",
                retry_after_s=1.0,
            )

    @contextlib.contextmanager
    def reserve(self, number: int) -> Iterator[Callable[[], None]]:
        """Reserve `number` until the end; each call of the result releases one of them sooner."""
        self.num_used += number
        num_left = number

        def release_one() -> None:
            nonlocal num_left
            num_left -= 1
            self.num_used -= 1

        try:
            yield release_one
        finally:
            self.num_used -= num_left
