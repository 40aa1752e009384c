"""HTTPS, with generated certificates of the server and of clients."""

from __future__ import annotations

import ssl

import httpx
import pytest

from jaxinfer.serving.config import TlsConfig
from tests.support.certificates import OPENSSL, make_authority, make_signed
from tests.support.http_harness import http_harness, run
from tests.support.tiny_server import tiny_engine

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="there is no openssl command here")


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()[0]


async def status_of(url: str, context: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(verify=context, timeout=30) as client:
        return (await client.get(f"{url}/v1/models")).status_code


def test_tls_client_is_served_if_it_trusts_the_authority(engine, tmp_path):
    authority = make_authority(tmp_path, "authority")
    stranger = make_authority(tmp_path, "stranger")
    server = make_signed(tmp_path, "server", authority)
    tls = TlsConfig(server.certificate, server.key)

    async def main():
        async with http_harness(engine, tls=tls) as harness:
            trusting = ssl.create_default_context(cafile=authority.certificate)
            assert await status_of(harness.url, trusting) == 200
            wary = ssl.create_default_context(cafile=stranger.certificate)
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await status_of(harness.url, wary)

    run(main())


def test_mutual_tls_requires_a_client_certificate(engine, tmp_path):
    authority = make_authority(tmp_path, "authority")
    server = make_signed(tmp_path, "server", authority)
    own = make_signed(tmp_path, "client", authority)
    tls = TlsConfig(server.certificate, server.key, authority.certificate)

    async def main():
        async with http_harness(engine, tls=tls) as harness:
            context = ssl.create_default_context(cafile=authority.certificate)
            with pytest.raises(httpx.TransportError):
                await status_of(harness.url, context)
            context.load_cert_chain(own.certificate, own.key)
            assert await status_of(harness.url, context) == 200

    run(main())


def test_missing_certificate_is_an_error_at_startup(engine, tmp_path):
    tls = TlsConfig(str(tmp_path / "absent.pem"), str(tmp_path / "absent.key"))

    async def main():
        with pytest.raises(OSError):
            async with http_harness(engine, tls=tls):
                pass

    run(main())
