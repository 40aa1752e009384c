"""Flags of the subcommands that run a model on several hosts (`jaxinfer.parallel.hosts`).

    jaxinfer serve --coordinator=10.0.0.1:8476 --num_processes=2 --process_id=0 ...
    jaxinfer serve --distributed ...          (a TPU pod, Slurm, MPI)

All processes get the same other flags. Process 0 carries out the subcommand; the others compute for
it, print nothing, and exit when it does. `--cpu_devices` makes JAX treat the CPU as several
devices, to try a mesh where there are no accelerators.
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
from jaxinfer.parallel.hosts.follower import wait_for_process_0

FLAGS = flags.FLAGS
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed",
    False,
    "this is one of several processes that jax finds by itself: TPU pod, Slurm, MPI",
)
_CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices", None, "treat the CPU as this many devices, to try a mesh", lower_bound=1
)
_HELP = {
    "coordinator": "HOST:PORT at which the other processes reach process 0",
    "num_processes": "the number of processes that run the model together",
    "process_id": "the index of this process, from 0",
    "channel_port": "port on which process 0 sends its plans; by default the coordinator's + 1",
    "channel_key_file": "a file with the secret that a process must know to join",
    "join_timeout_s": "seconds within which all processes must have joined",
    "heartbeat_timeout_s": "seconds without a message after which a process counts as lost",
    "check_steps": "steps between two checks that the processes ran the same plans",
}
for _field in dataclasses.fields(HostsConfig):
    _define = {"int": flags.DEFINE_integer, "float": flags.DEFINE_float}.get(
        str(_field.type).partition(" ")[0], flags.DEFINE_string
    )
    _define(_field.name, None, _HELP[_field.name])
# What `--help` shows; the rest is in `--helpfull`.
HELP = ("distributed", "coordinator", "num_processes", "process_id", "cpu_devices")


@contextlib.contextmanager
def process_group() -> Iterator[Peers]:
    """Join the processes that the flags name before anything touches a device, and part at the end.

    An error in one process ends all: this one reports it and does not return.
    """
    if _CPU_DEVICES.value is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES.value)
    if _DISTRIBUTED.value or FLAGS["coordinator"].value is not None:
        _redirect_stdout()
    peers = _join()
    try:
        yield peers
    except KeyboardInterrupt:
        _leave(peers)
        raise
    except BaseException as error:
        if peers.num_processes > 1:
            peers.abandon(error, _report(error))
        raise
    _leave(peers)


def _redirect_stdout() -> None:
    """Keep stdout for this program's own output: gloo, which connects CPUs, prints there too."""
    sys.stdout.flush()
    descriptor = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(descriptor, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def follow_process_0(model: str, config: EngineConfig, peers: Peers) -> int:
    """Run the steps that process 0 sends until it stops; the return value is an exit code."""
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


def _leave(peers: Peers) -> None:
    peers.stop()
    peers.close()


def _report(error: BaseException) -> int:
    """Print what has happened, and return an exit code."""
    if isinstance(error, CheckpointError | ConfigError | HostsError | OSError | ValueError):
        print(f"error: {error}", file=sys.stderr)
        return EXIT_LOST if isinstance(error, HostsError) else 2
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    traceback.print_exception(error)
    return 1
