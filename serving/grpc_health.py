"""The standard health service of gRPC, as this server needs it."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2

MAX_WATCHES = 256  # of health, at once: nobody needs a key for one
MAX_NAME_LEN = 256  # of a service that is asked after


class HealthServicer(health.aio.HealthServicer):  # type: ignore[attr-defined]  # stubs lack aio
    """The standard one, whose watchers do not hold up the end of the server."""

    def __init__(self):
        super().__init__()
        self._watches: set[asyncio.Timeout] = set()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        if len(self._watches) >= MAX_WATCHES or len(request.service) > MAX_NAME_LEN:
            text = f"at most {MAX_WATCHES} watch at once, names of {MAX_NAME_LEN} characters"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        watch = asyncio.timeout(None)
        try:
            async with watch:
                self._watches.add(watch)
                await super().Watch(request, context)
        except TimeoutError:
            return
        finally:
            self._watches.discard(watch)

    async def end(self) -> None:
        """Everything is NOT_SERVING from now on, and nobody watches any more."""
        await self.enter_graceful_shutdown()
        now = asyncio.get_running_loop().time()
        for watch in self._watches:
            watch.reschedule(now)
