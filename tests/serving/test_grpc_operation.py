"""Operation of the gRPC server: startup, health, reflection and shutdown."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from jaxinfer import ConfigError, Engine
from jaxinfer.serving.config import ServingConfig
from jaxinfer.serving.grpc_server import SERVICE, build_grpc_server
from jaxinfer.serving.health import Health, State
from jaxinfer.serving.metrics import Metrics
from jaxinfer.serving.protos.jaxinfer.v1.inference_pb2_grpc import InferenceStub
from tests.support.grpc_harness import EOF, Relay, grpc_harness, make_request, run, serving_health
from tests.support.tiny_server import Brake, tiny_engine, tiny_service

STATUS = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


@pytest.fixture
def brake(engine):
    """A brake on the shared engine, for one test."""
    brake = Brake(engine)
    yield brake
    brake.release()
    del engine.step  # the instance's own: the class's is back


def test_grpc_health_follows_the_server_for_each_service(engine):
    async def main():
        health = Health()
        async with grpc_harness(engine, health=health) as harness:
            probe: Any = health_pb2_grpc.HealthStub(harness.channel)

            async def statuses() -> set[int]:
                await asyncio.sleep(0)
                names = ("", SERVICE)
                requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
                return {(await probe.Check(request)).status for request in requests}

            assert await statuses() == {STATUS.NOT_SERVING}
            health.set(State.SERVING)
            assert await statuses() == {STATUS.SERVING}
            health.set(State.DRAINING)
            assert await statuses() == {STATUS.NOT_SERVING}
            health.set(State.DEAD)
            assert await statuses() == {STATUS.NOT_SERVING}
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await probe.Check(health_pb2.HealthCheckRequest(service="jaxinfer.v1.Other"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(main())


def test_health_watcher_is_notified_and_does_not_delay_shutdown(engine):
    async def main():
        health = Health()
        async with grpc_harness(engine, health=health) as harness:
            probe: Any = health_pb2_grpc.HealthStub(harness.channel)
            watch = probe.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == STATUS.NOT_SERVING
            health.set(State.SERVING)
            assert (await watch.read()).status == STATUS.SERVING
            health.set(State.DRAINING)
            assert (await watch.read()).status == STATUS.NOT_SERVING
            async with asyncio.timeout(20):
                await harness.server.stop(1000.0)
            assert await watch.read() is EOF

    run(main())


def test_reflection_lists_the_services_and_their_messages(engine):
    def learn(target: str) -> tuple[set[str], set[str]]:
        with grpc.insecure_channel(target) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            services = set(database.get_services())
            found = DescriptorPool(database).FindServiceByName(SERVICE)
            return services, {method.name for method in found.methods}

    async def main():
        async with grpc_harness(engine) as harness:
            services, methods = await asyncio.to_thread(learn, harness.target)
            assert services == {
                "jaxinfer.v1.Inference",
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            expected = {"Generate", "Complete", "Tokenize", "Detokenize", "GetModel", "GetStats"}
            assert methods == expected | {"Embed"}

    run(main())


def test_stream_may_end_within_the_grace_period(engine, brake):
    async def main():
        async with grpc_harness(engine) as harness:
            brake.hold()
            call = harness.stub.Generate(make_request(max_tokens=8))
            await call.read()
            stopping = asyncio.create_task(harness.server.stop(1000.0))
            await asyncio.sleep(0.01)
            brake.release()
            while (part := await call.read()) is not EOF:
                last = part
            assert last.finished.usage.output_tokens == 8
            async with asyncio.timeout(20):
                await stopping

    run(main())


def test_stream_beyond_the_grace_period_is_cancelled_and_frees_pages(engine, brake):
    async def main():
        async with grpc_harness(engine) as harness:
            brake.hold()
            calls = [
                harness.stub.Generate(make_request(max_tokens=400)),
                harness.stub.Complete(make_request()),
            ]
            await calls[0].read()
            while harness.service.loop.num_streams < 2:
                await asyncio.sleep(0.001)
            await harness.server.stop(0.05)
            assert harness.service.loop.num_streams == 0
            for call in calls:
                assert await call.code() is not grpc.StatusCode.OK

    run(main())


def test_pings_detect_a_vanished_client(engine, brake):
    async def main():
        config = ServingConfig(grpc_port=0, keepalive_s=1.0)
        async with (
            grpc_harness(engine, config) as harness,
            Relay(harness.port) as relay,
            grpc.aio.insecure_channel(relay.target) as channel,
        ):
            brake.seconds = 0.1  # it would take 40 seconds
            call = InferenceStub(channel).Generate(make_request(max_tokens=400))
            await call.read()
            relay.freeze()
            async with asyncio.timeout(20):
                while harness.service.loop.num_streams:
                    await asyncio.sleep(0.01)
            brake.seconds = 0.0
            call.cancel()

    run(main())


def test_port_in_use_is_refused_with_the_way_out(engine):
    async def main():
        async with grpc_harness(engine) as harness:
            config = ServingConfig(grpc_port=harness.port)
            second = build_grpc_server(harness.service, config, None, serving_health(), Metrics())
            with pytest.raises(ConfigError, match=f"{harness.port}.*serving.grpc_port"):
                await second.start()
            await second.stop(0.0)

    run(main())


def test_server_listens_on_the_configured_address(engine):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")

    async def main():
        config = ServingConfig(grpc_port=0, host="::1")
        async with tiny_service(engine) as service:
            server = build_grpc_server(service, config, None, serving_health(), Metrics())
            port = await server.start()
            try:
                async with grpc.aio.insecure_channel(f"[::1]:{port}") as channel:
                    await InferenceStub(channel).Complete(make_request())
            finally:
                await server.stop(0.0)

    run(main())


def test_stop_before_start_does_nothing(engine):
    async def main():
        async with tiny_service(engine) as service:
            config = ServingConfig(grpc_port=0)
            await build_grpc_server(service, config, None, serving_health(), Metrics()).stop(1.0)

    run(main())
