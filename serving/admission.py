"""How many samples, or texts of an encoder, may be unfinished at once; for the event loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jaxinfer import Embedder, Engine, Replicas
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError


class AdmissionQuota:
    """`num_taken` of `most`."""

    def __init__(self, engine: Engine | Replicas | Embedder, limits: LimitsConfig):
        is_encoder = isinstance(engine, Embedder)
        self._limit = "max_waiting_texts" if is_encoder else "max_waiting"
        self._what, self._field = ("texts", "input") if is_encoder else ("samples", "n")
        has_replicas = engine.config.mesh.data > 1
        self._rows = (
            "mesh.data * scheduler.max_num_seqs" if has_replicas else "scheduler.max_num_seqs"
        )
        self.most = engine.config.max_running + getattr(limits, self._limit)
        self.num_taken = 0

    def check(self, number: int) -> None:
        """Raise a `ServiceError` if more places are asked for than are free, or than there are."""
        if number > self.most:
            raise ServiceError(
                ErrorKind.INVALID,
                f"the request has {number} {self._what}; this server takes on {self.most} at once",
                field=self._field,
            )
        if self.num_taken + number > self.most:
            raise ServiceError(
                ErrorKind.OVERLOADED,
                f"{self.num_taken} {self._what} are under way, of {self.most} that may be "
                f"({self._rows} + serving.limits.{self._limit}), and {number} more were "
                "asked for; try again later",
                retry_after_s=1.0,
            )

    @contextlib.contextmanager
    def hold(self, number: int) -> Iterator[Callable[[], None]]:
        """Take places until the end; what it gives frees one of them sooner, at each call."""
        self.num_taken += number
        num_left = number

        def release_one() -> None:
            nonlocal num_left
            num_left -= 1
            self.num_taken -= 1

        try:
            yield release_one
        finally:
            self.num_taken -= num_left
