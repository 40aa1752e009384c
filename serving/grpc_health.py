"""The standard health service of gRPC, with limits on watchers."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2

MAX_WATCHES = 256  # concurrent; watching needs no key
MAX_NAME_LEN = 256  # characters of a service's name


class HealthServicer(health.aio.HealthServicer):  # type: ignore[attr-defined]  # stubs lack aio
    """The standard servicer, except that its watchers do not delay the shutdown."""

    def __init__(self):
        super().__init__()
        self._watches: set[asyncio.Timeout] = set()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        if len(self._watches) >= MAX_WATCHES or len(request.service) > MAX_NAME_LEN:
            text = f"at most {MAX_WATCHES} watches, of names up to {MAX_NAME_LEN} characters"
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
        """Report NOT_SERVING for everything, and end all watches."""
        await self.enter_graceful_shutdown()
        now = asyncio.get_running_loop().time()
        for watch in self._watches:
            watch.reschedule(now)
