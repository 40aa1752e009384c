"""Access to the gRPC server: bearer tokens, TLS, mutual TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxinfer import ConfigError, Engine
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import ServingConfig, TlsConfig
from jaxinfer.serving.grpc_tls import server_credentials
from jaxinfer.serving.observer import Observer
from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.serving.protos.jaxinfer.v1.inference_pb2_grpc import InferenceStub
from tests.support.certificates import Pair, make_authority, make_signed
from tests.support.grpc_harness import GrpcHarness, error_of, grpc_harness, make_request, run
from tests.support.tiny_server import tiny_engine

CODES = grpc.StatusCode
KEYS = ApiKeys([("ann", "key-of-ann-1"), ("bob", "key-of-bob-2")])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


def bearer(token: str, scheme: str = "Bearer") -> tuple[tuple[str, str]]:
    return (("authorization", f"{scheme} {token}"),)


def calls(harness: GrpcHarness, metadata) -> list:
    """A call of every method."""
    stub = harness.stub
    return [
        stub.Generate(make_request(), metadata=metadata),
        stub.Complete(make_request(), metadata=metadata),
        stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=metadata),
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]), metadata=metadata),
        stub.GetModel(pb.GetModelRequest(), metadata=metadata),
        stub.GetStats(pb.GetStatsRequest(), metadata=metadata),
    ]


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        bearer(""),
        bearer("key-of-ann-2"),
        bearer("key-of-ann-"),
        bearer("key-of-ann-1 x"),
        bearer("key-of-ann-1", "Basic"),
        (("authorization", "key-of-ann-1"),),
        (("api-key", "key-of-ann-1"),),
        (("authorization", "Bearer wrong-key-1"), ("authorization", "Bearer key-of-ann-1")),
    ],
)
def test_every_method_is_refused_without_a_known_key(engine, metadata):
    async def main():
        async with grpc_harness(engine, keys=KEYS) as harness:
            num_steps = engine.stats.num_steps
            for call in calls(harness, metadata):
                error = await error_of(call)
                assert error.code() is CODES.UNAUTHENTICATED
                assert "authorization: Bearer" in error.details()
                assert "key-of" not in error.details()
            assert engine.stats.num_steps == num_steps

    run(main())


def test_every_key_allows_every_method(engine):
    async def main():
        async with grpc_harness(engine, keys=KEYS) as harness:
            for metadata in (bearer("key-of-ann-1"), bearer("key-of-bob-2", "bearer")):
                for call in calls(harness, metadata):
                    if hasattr(call, "__aiter__"):
                        assert [part async for part in call]
                    else:
                        await call

    run(main())


def test_key_name_is_the_user_unless_the_request_names_one(engine):
    users: list[str] = []
    observer = Observer(on_end=lambda stream: users.append(stream.request.user))

    async def main():
        async with grpc_harness(engine, keys=KEYS, observers=(observer,)) as harness:
            await harness.stub.Complete(make_request(), metadata=bearer("key-of-bob-2"))
            await harness.stub.Complete(make_request(user="carol"), metadata=bearer("key-of-bob-2"))

    run(main())
    assert users == ["bob", "carol"]


def test_health_needs_no_key_but_reflection_does(engine):
    async def main():
        async with grpc_harness(engine, keys=KEYS) as harness:
            channel: Any = harness.channel
            probe: Any = health_pb2_grpc.HealthStub(channel)
            answer = await probe.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            listing = reflection_pb2.ServerReflectionRequest(list_services="")
            reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            reflect = reflection.ServerReflectionInfo
            assert (await error_of(reflect(iter([listing])))).code() is CODES.UNAUTHENTICATED
            parts = [p async for p in reflect(iter([listing]), metadata=bearer("key-of-ann-1"))]
            assert parts[0].list_services_response.service
            unknown = harness.channel.unary_unary("/jaxinfer.v1.Inference/Train")
            assert (await error_of(unknown(b""))).code() is CODES.UNAUTHENTICATED

    run(main())


def test_unauthenticated_call_is_refused_before_its_message_is_read(engine):
    async def main():
        async with grpc_harness(engine, keys=KEYS) as harness:
            call = harness.channel.unary_unary("/jaxinfer.v1.Inference/Complete")(b"\xff" * 100_000)
            assert (await error_of(call)).code() is CODES.UNAUTHENTICATED

    run(main())


class Certificates:
    """Two authorities, one of which has signed a server's and a client's certificate."""

    def __init__(self, folder: Path):
        self.authority = make_authority(folder, "authority")
        self.other_authority = make_authority(folder, "other")
        self.server = make_signed(folder, "server", self.authority)
        self.client = make_signed(folder, "client", self.authority)
        self.stranger = make_signed(folder, "stranger", self.other_authority)

    def config(self, client_ca: str | None = None) -> ServingConfig:
        tls = TlsConfig(self.server.certificate, self.server.key, client_ca)
        return ServingConfig(grpc_port=0, tls=tls)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


async def call_over_tls(harness: GrpcHarness, root: Pair | None, own: Pair | None = None) -> None:
    """Make a call that trusts `root` and presents `own`."""
    credentials = grpc.ssl_channel_credentials(
        root and Path(root.certificate).read_bytes(),
        own and Path(own.key).read_bytes(),
        own and Path(own.certificate).read_bytes(),
    )
    async with grpc.aio.secure_channel(harness.target, credentials) as channel:
        answer = await InferenceStub(channel).Complete(make_request(), timeout=20)
        assert answer.finished.usage.output_tokens == 8


async def is_refused(harness: GrpcHarness, root: Pair | None, own: Pair | None = None) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call_over_tls(harness, root, own)
    assert caught.value.code() is CODES.UNAVAILABLE


def test_tls_serves_clients_that_trust_its_certificate(engine, certificates):
    async def main():
        async with grpc_harness(engine, certificates.config()) as harness:
            await call_over_tls(harness, certificates.authority)
            await is_refused(harness, certificates.other_authority)
            error = await error_of(harness.stub.Complete(make_request()))  # in clear text
            assert error.code() is CODES.UNAVAILABLE
            await call_over_tls(harness, certificates.authority)

    run(main())


def test_mutual_tls_serves_only_clients_with_a_trusted_certificate(engine, certificates):
    async def main():
        own = certificates.config(client_ca=certificates.authority.certificate)
        async with grpc_harness(engine, own) as harness:
            await call_over_tls(harness, certificates.authority, certificates.client)
            await is_refused(harness, certificates.authority)
            await is_refused(harness, certificates.authority, certificates.stranger)
            await is_refused(harness, certificates.other_authority, certificates.client)
            await call_over_tls(harness, certificates.authority, certificates.client)

    run(main())


def test_tls_and_keys_work_together(engine, certificates):
    async def main():
        async with grpc_harness(engine, certificates.config(), keys=KEYS) as harness:
            root = Path(certificates.authority.certificate).read_bytes()
            credentials = grpc.ssl_channel_credentials(root)
            async with grpc.aio.secure_channel(harness.target, credentials) as channel:
                stub = InferenceStub(channel)
                assert (
                    await error_of(stub.Complete(make_request()))
                ).code() is CODES.UNAUTHENTICATED
                await stub.Complete(make_request(), metadata=bearer("key-of-ann-1"))

    run(main())


def test_invalid_certificate_files_are_refused_at_startup(certificates, tmp_path):
    server, other = certificates.server, certificates.stranger
    junk, absent = tmp_path / "junk.pem", tmp_path / "absent.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n")
    assert server_credentials(TlsConfig()) is None
    for wrong, text in [
        (TlsConfig(str(absent), server.key), "absent"),
        (TlsConfig(str(junk), server.key), "junk"),
        (TlsConfig(server.certificate, other.key), "tls.key"),
        (TlsConfig(server.certificate, server.key, str(absent)), "client_ca"),
        (TlsConfig(server.certificate, server.key, str(junk)), "client_ca"),
    ]:
        with pytest.raises(ConfigError, match=text):
            server_credentials(wrong)
