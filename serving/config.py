"""The server's own options: the `[serving]` table of a preset, beside the engine's keys."""

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
    """What the server takes on at once; see `serving/loop.py` for the rules."""

    max_waiting: int = at_least(0, 256)  # requests beyond scheduler.max_num_seqs
    max_waiting_texts: int = at_least(0, 4096)  # the same of an encoder, which takes many at once
    max_waiting_tokens: int = at_least(1, 1_000_000)  # prompt tokens that wait for a first token
    max_unread_tokens: int = at_least(1, 4096)  # output a client may leave unread; then it is cut
    max_body_bytes: int = at_least(1, 2**20)  # of an HTTP request or a gRPC message
    max_nesting: int = at_least(1, 32)  # brackets within brackets, of a JSON body
    timeout_s: float = at_least(1e-3, 600.0)  # of requests that name none; the most to name
    send_timeout_s: float = at_least(0, 60.0)  # a client that takes no byte for so long is cut


@dataclasses.dataclass(frozen=True)
class TlsConfig:
    """PEM files. With `client_ca` clients must show a certificate signed by it (mutual TLS)."""

    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None


@dataclasses.dataclass(frozen=True)
class ServingConfig:
    """How the server listens, whom it lets in, and how it ends. Port 0: any free one; None: off."""

    host: str = "127.0.0.1"
    http_port: int | None = at_least(0, 8000, at_most=65535)
    grpc_port: int | None = at_least(0, 9000, at_most=65535)
    limits: LimitsConfig = LimitsConfig()
    tls: TlsConfig = TlsConfig()  # for both doors
    api_keys_file: str | None = None  # `name:key` or a key a line; None: open to everybody
    model_name: str | None = None  # what clients call the model; None: the checkpoint's name
    cors_origins: tuple[str, ...] = ()  # web pages of these origins may call; none by default
    page: bool = True  # the chat page at /
    log_prompts: bool = False  # prompt and output text in the request log
    drain_s: float = at_least(0, 30.0)  # after SIGTERM, for what is in flight
    watchdog_s: float = at_least(0, 120.0)  # a step that takes longer ends the process; 0: off
    keepalive_s: float = at_least(1, 30.0)  # HTTP keep-alive, and the interval of gRPC's pings
    otlp_endpoint: str | None = None  # where traces go (needs the extra `tracing`)

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
    """Engine and server options of a preset and `key.path=value` overrides.

    The server's keys are under `serving.`. Raises `ConfigError` with every problem at once.
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
