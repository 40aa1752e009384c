"""The server's options: the `[serving]` table of a preset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxinfer.config import EngineConfig, from_mapping, load_preset
from jaxinfer.options import (
    ConfigError,
    at_least,
    from_nested,
    merge,
    parse_overrides,
    range_problems,
)


@dataclasses.dataclass(frozen=True)
class LimitsConfig:
    """Limits on what the server takes on at once; `serving/loop.py` states the rules."""

    max_waiting: int = at_least(0, 256)  # requests beyond scheduler.max_num_seqs
    max_waiting_texts: int = at_least(0, 4096)  # the same for an encoder's texts
    max_waiting_tokens: int = at_least(1, 1_000_000)  # prompt tokens without a first output token
    max_unread_tokens: int = at_least(1, 4096)  # unread output after which a client is cut off
    max_body_bytes: int = at_least(1, 2**20)  # HTTP body or gRPC message
    max_nesting: int = at_least(1, 32)  # nesting depth of a JSON body
    timeout_s: float = at_least(1e-3, 600.0)  # default and maximum of a request's timeout
    send_timeout_s: float = at_least(
        0, 60.0
    )  # a client that reads nothing for this time is cut off; 0: never


@dataclasses.dataclass(frozen=True)
class TlsConfig:
    """PEM files. With `client_ca` clients must present a certificate it signed (mutual TLS)."""

    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None


@dataclasses.dataclass(frozen=True)
class ServingConfig:
    """Where the server listens, who may call it and how it shuts down.

    Port 0 takes any free port; None turns the protocol off.
    """

    host: str = "127.0.0.1"
    http_port: int | None = at_least(0, 8000, at_most=65535)
    grpc_port: int | None = at_least(0, 9000, at_most=65535)
    limits: LimitsConfig = LimitsConfig()
    tls: TlsConfig = TlsConfig()  # for HTTP and gRPC
    api_keys_file: str | None = None  # `name:key` or a key a line; None: open to everybody
    model_name: str | None = None  # as clients name the model; None: the checkpoint's
    cors_origins: tuple[str, ...] = ()  # web origins that may call
    page: bool = True  # the chat page at /
    log_prompts: bool = False  # log prompt and output texts
    drain_s: float = at_least(0, 30.0)  # time for requests to finish after SIGTERM
    watchdog_s: float = at_least(0, 120.0)  # a step that takes longer ends the process; 0: off
    keepalive_s: float = at_least(1, 30.0)  # HTTP keep-alive, and interval of gRPC pings
    otlp_endpoint: str | None = None  # collector of traces (needs the extra `tracing`)

    def __post_init__(self):
        problems = list(range_problems(self, "serving."))
        if (self.tls.certificate is None) != (self.tls.key is None):
            problems.append("serving.tls.certificate and serving.tls.key belong together; set both")
        if self.tls.client_ca is not None and self.tls.certificate is None:
            problems.append("serving.tls.client_ca needs serving.tls.certificate and .key")
        if self.http_port is None and self.grpc_port is None:
            problems.append("serving.http_port and serving.grpc_port are both unset; set one")
        if problems:
            raise ConfigError("; ".join(problems))


def load_configs(
    preset: str | None = None, overrides: Iterable[str] = ()
) -> tuple[EngineConfig, ServingConfig]:
    """The engine's and the server's options, of a preset and `key.path=value` overrides.

    The server's keys begin with `serving.`. Raises `ConfigError` with all problems at once.
    """
    keys = merge(load_preset(preset) if preset else {}, parse_overrides(overrides))
    table = keys.pop("serving", {})
    problems = []
    engine, serving = EngineConfig(), ServingConfig()
    try:
        engine = from_mapping(keys)
    except ConfigError as error:
        problems.append(str(error))
    try:
        serving = from_nested(ServingConfig, table, "serving.")
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(problems))
    return engine, serving
