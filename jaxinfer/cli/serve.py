"""Serve a model: gRPC, an HTTP API compatible with OpenAI's, and a page to talk to.

    python scripts/serve.py --model=demo --config=demo
    python scripts/serve.py --model=PATH --http_port=0 --grpc_port=none --host=0.0.0.0
    python scripts/serve.py --model=demo --set scheduler.max_num_seqs=8 --set serving.drain_s=60

`--config=PRESET` and `--set key.path=value` reach every option of the engine, and of the server
under `serving.`; the flags of their own are short for some of these, and win. When requests are
taken, stdout gets one line of JSON, {"http": ADDRESS, "grpc": ADDRESS, "model": NAME, "pid": PID},
null for a door that is off; the log goes to stderr, one JSON object a request.

SIGTERM or Ctrl-C: nothing new is taken, what is under way finishes, exit code 0; again: stop now,
143 or 130. Exit code 2: the options, the checkpoint or a port are of no use, and stderr says why;
70: the engine is lost, and a supervisor should start another process.

On several hosts each runs this script, with the flags of `host_flags.py`; process 0 has the doors.
"""

from __future__ import annotations

import faulthandler
import json
import sys

from absl import app, flags, logging

from jaxinfer import CheckpointError, ConfigError
from jaxinfer.cli import host_flags
from jaxinfer.cli.host_flags import follow_process_0, joined
from jaxinfer.parallel.hosts import HostsError, Peers

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(host_flags)  # --help shows them
_MODEL = flags.DEFINE_string(
    "model", "demo", '"demo", a .gguf file, a Hugging Face directory, or a hub id'
)
_CONFIG = flags.DEFINE_string("config", None, "a preset's name or a .toml file")
_SET = flags.DEFINE_multi_string(
    "set", [], "option of the engine or, as serving.*, of the server: key.path=value; repeatable"
)
_LOAD_FORMAT = flags.DEFINE_enum(
    "load_format", None, ["auto", "random"], "random: a configuration will do, weights are drawn"
)
# Each sets the option of its name in `serving.`, and is None unless given.
_TEXTS = {
    "host": "address to listen on; 127.0.0.1: this machine alone, 0.0.0.0: all networks",
    "api_keys_file": "a file of API keys, one or name:key a line; without it anybody may call",
    "model_name": "what clients call the model; the checkpoint's name if not given",
}
_PORTS = {
    "http_port": "HTTP port; 0: any free one, none: no HTTP",
    "grpc_port": "gRPC port; 0: any free one, none: no gRPC",
}
for _name, _help in (_TEXTS | _PORTS).items():
    flags.DEFINE_string(_name, None, _help)


def overrides() -> list[str]:
    """All options given on the command line, as `key.path=value`."""
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
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # jax reports each platform it does not find
    try:
        with joined() as peers:
            return run(peers)
    except (CheckpointError, ConfigError, HostsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    app.run(main)
