"""Flags of a process among several (`jaxinfer.parallel.hosts`), for the scripts that run a model.

    python scripts/serve.py --coordinator=10.0.0.1:8476 --num_processes=2 --process_id=0 ...
    python scripts/serve.py --distributed ...          (a TPU pod, Slurm, MPI)

All processes get the same other flags. Process 0 does what the script says; the others work for it,
print nothing, and end when it does. `--cpu_devices` makes a process see the CPU as so many devices,
to try a mesh where there are no accelerators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator

import jax
from absl import flags

from jaxinfer import CheckpointError, ConfigError, Engine, EngineConfig
from jaxinfer.build import load_model
from jaxinfer.parallel.hosts import ALONE, EXIT_LOST, HostsConfig, HostsError, Peers, follow, join
from jaxinfer.parallel.hosts.following import wait_for_process_0

FLAGS = flags.FLAGS
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "one of several processes that jax finds by itself: TPU pod, Slurm, MPI"
)
_CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices", None, "take the CPU for so many devices, to try a mesh", lower_bound=1
)
_HELP = {
    "coordinator": "HOST:PORT of process 0, as the other processes reach it",
    "num_processes": "how many processes run the model together",
    "process_id": "which of them this is, from 0",
    "channel_port": "port by which process 0 sends its plans; by default the coordinator's + 1",
    "channel_key_file": "a file with a secret, the same for all: strangers cannot join",
    "join_timeout_s": "seconds for all processes to be there",
    "silence_s": "seconds without a word after which a process is taken for lost",
    "check_steps": "steps from one comparison of what the processes ran to the next",
}
for _field in dataclasses.fields(HostsConfig):
    _define = {"int": flags.DEFINE_integer, "float": flags.DEFINE_float}.get(
        str(_field.type).partition(" ")[0], flags.DEFINE_string
    )
    _define(_field.name, None, _HELP[_field.name])


@contextlib.contextmanager
def joined() -> Iterator[Peers]:
    """The processes that the flags name, met before anything touches a device, for the time of a
    run. An error in one ends all: this one then says what it is, and does not return."""
    if _CPU_DEVICES.value is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES.value)
    if _DISTRIBUTED.value or FLAGS["coordinator"].value is not None:
        _keep_stdout()
    peers = _join()
    try:
        yield peers
    except KeyboardInterrupt:
        _part(peers)
        raise
    except BaseException as error:
        if peers.num_processes > 1:
            peers.abandon(error, _report(error))
        raise
    _part(peers)


def _keep_stdout() -> None:
    """For what is printed here: gloo, by which CPUs reach each other, writes there too."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def follow_process_0(model: str, config: EngineConfig, peers: Peers) -> int:
    """What every process but the first does; returns an exit code when process 0 stops."""
    wait_for_process_0(peers.process_id)
    engine, _ = load_model(model, config, show_progress=False, peers=peers)
    assert isinstance(engine, Engine)
    follow(engine.runner, peers)
    return 0


def _join() -> Peers:
    values = {field.name: FLAGS[field.name].value for field in dataclasses.fields(HostsConfig)}
    given = {name: value for name, value in values.items() if value is not None}
    if _DISTRIBUTED.value == ("coordinator" in given) and (_DISTRIBUTED.value or given):
        raise ConfigError(
            "give --coordinator, --num_processes and --process_id, or --distributed where jax finds"
            f" the processes by itself; given: {', '.join('--' + name for name in given)}"
        )
    return join(HostsConfig(**given)) if _DISTRIBUTED.value or given else ALONE


def _part(peers: Peers) -> None:
    peers.stop()
    peers.close()


def _report(error: BaseException) -> int:
    """Say what has happened; the exit code."""
    if isinstance(error, CheckpointError | ConfigError | HostsError | OSError | ValueError):
        print(f"error: {error}", file=sys.stderr)
        return EXIT_LOST if isinstance(error, HostsError) else 2
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    traceback.print_exception(error)
    return 1
