"""TLS credentials of the gRPC server, from PEM files checked before it listens."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from jaxinfer.options import ConfigError
from jaxinfer.serving.config import TlsConfig


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials | None:
    """The server's credentials, which with `client_ca` require a client's; None without TLS.

    Raises `ConfigError` for a file that cannot be used: gRPC itself would report nothing until
    a client fails to connect.
    """
    if tls.certificate is None or tls.key is None:
        return None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            tls.certificate, tls.key, password=_refuse_password
        )
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"serving.tls.certificate={tls.certificate} and serving.tls.key={tls.key} cannot be "
            f"used: {error}; they must be PEM files of a certificate and its key"
        ) from error
    pair = Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes()
    if tls.client_ca is None:
        return grpc.ssl_server_credentials([pair])
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.client_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"serving.tls.client_ca={tls.client_ca} cannot be used: {error}; it must be a PEM file "
            "of the certificates that sign those of clients"
        ) from error
    roots = Path(tls.client_ca).read_bytes()
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=True)


def _refuse_password() -> str:
    """The password callback: it is called for an encrypted key, which gRPC cannot read."""
    raise ValueError("the key is encrypted, which is not supported")
