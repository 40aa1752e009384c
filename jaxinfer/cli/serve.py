"""Serve a model over an HTTP API compatible with OpenAI's and over gRPC, with a chat page.

    jaxinfer serve --model=demo --config=demo
    jaxinfer serve --model=PATH --http_port=0 --grpc_port=none --host=0.0.0.0
    jaxinfer serve --model=demo --set scheduler.max_num_seqs=8 --set serving.drain_s=60

`--config=PRESET` and `--set key.path=value` reach every option of the engine, and those of the
server under `serving.`. The other flags are short forms of some of these options, and take
precedence. Once the server accepts requests, it prints one line of JSON on stdout, {"http":
ADDRESS, "grpc": ADDRESS, "model": NAME, "pid": PID}, with null for a protocol that is off. The log
goes to stderr, one JSON object for each request.

On SIGTERM or Ctrl-C the server refuses new requests, finishes the running ones, and exits with code
0; a second signal stops it at once, with 143 or 130. Exit code 2: the options, the checkpoint or a
port cannot be used, and stderr says why. Exit code 70: the engine has failed, and a supervisor
should start another process.

On several hosts run the same command on each, with `--distributed` or `--coordinator`; process 0
listens.
"""

from __future__ import annotations

import faulthandler
import json
import sys

from absl import flags

from jaxinfer import CheckpointError, ConfigError
from jaxinfer.cli import host_flags
from jaxinfer.cli.host_flags import follow_process_0, process_group
from jaxinfer.parallel.hosts import HostsError, Peers

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(host_flags)  # --help shows them
_MODEL = flags.DEFINE_string(
    "model", "demo", '"demo", a .gguf file, a Hugging Face directory, or a hub id'
)
_CONFIG = flags.DEFINE_string("config", None, "a preset's name or a .toml file")
_SET = flags.DEFINE_multi_string(
    "set",
    [],
    "option of the engine or, as serving.*, of the server: key.path=value; may be repeated",
)
_LOAD_FORMAT = flags.DEFINE_enum(
    "load_format",
    None,
    ["auto", "random"],
    "random: draw random weights; only a configuration is needed",
)
# Each flag sets the option of its name under `serving.`, and is None unless given.
_TEXTS = {
    "host": "address to listen on; 127.0.0.1: only this machine, 0.0.0.0: all networks",
    "api_keys_file": "a file with an API key, or name:key, on each line; unset: no key is needed",
    "model_name": "the model's name for clients; by default the checkpoint's",
}
_PORTS = {
    "http_port": "HTTP port; 0: any free port, none: no HTTP (default: 8000)",
    "grpc_port": "gRPC port; 0: any free port, none: no gRPC (default: 9000)",
}
for _name, _help in (_TEXTS | _PORTS).items():
    flags.DEFINE_string(_name, None, _help)
HELP = {
    "Model": ("model", "config", "set", "load_format"),
    "Server": ("host", "http_port", "grpc_port", "api_keys_file", "model_name"),
    "Several devices": host_flags.HELP,
}


def overrides() -> list[str]:
    """Return all options given on the command line, as `key.path=value`."""
    chosen = list(_SET.value)
    if _LOAD_FORMAT.value is not None:
        chosen.append(f"load_format={_LOAD_FORMAT.value}")
    for name in _TEXTS:
        if (value := FLAGS[name].value) is not None:
            chosen.append(f"serving.{name}={json.dumps(value, ensure_ascii=False)}")
    for name in _PORTS:
        if (value := FLAGS[name].value) is not None:
            chosen.append(f"serving.{name}={value}")
    return chosen


def run(peers: Peers) -> int:
    """Serve on process 0, follow it on the others; the return value is an exit code."""
    try:
        from jaxinfer.serving import process
        from jaxinfer.serving.config import load_configs
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "jaxinfer":
            raise
        text = f"the package {error.name} is missing; pip install 'jaxinfer[serve]'"
        raise ConfigError(text) from error
    faulthandler.enable()  # a crash inside XLA shows where it was
    engine_config, config = load_configs(_CONFIG.value, overrides())
    if not peers.is_leader:
        return follow_process_0(_MODEL.value, engine_config, peers)
    return process.serve(_MODEL.value, engine_config, config, peers)


def main(argv: list[str]) -> int:
    """Serve the model that the flags name, and return an exit code."""
    del argv
    try:
        with process_group() as peers:
            return run(peers)
    except (CheckpointError, ConfigError, HostsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
