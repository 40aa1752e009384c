"""From a configuration to processes that know each other: the channel, then `jax.distributed`."""

from __future__ import annotations

import atexit
import os
import socket
from importlib import metadata

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxinfer
from jaxinfer.parallel.hosts.config import HostsConfig
from jaxinfer.parallel.hosts.joining import admit_all, knock, listen
from jaxinfer.parallel.hosts.links import HostsError, Link, Watch
from jaxinfer.parallel.hosts.peers import ALONE, Follower, Leader, Peers

# jax's own service notices a death too, later, and ends the process with pages of stacks.
SERVICE_HEARTBEAT_S = 100
SHUTDOWN_S = 10  # at a process's end it waits so long for the others' ends
ADDRESS_BYTES = 256
KEY_BYTES = 32
BACKDROP = ("192.0.2.1", 9)  # of a block for documentation (RFC 5737): nothing is sent to it


def join(config: HostsConfig) -> Peers:
    """Meet the other processes, before anything else touches a device. `HostsError` says who is
    missing or does not fit. On a CPU, devices of several processes reach each other by gloo.

    With a coordinator's address the channel comes first: whoever cannot be reached, or has another
    version, is then named before `jax.distributed` would wait for it. Where jax finds the processes
    by itself, process 0 tells its address and a key through the devices.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its notice of a machine that is to be taken away is for those who save checkpoints.
    jax.config.update("jax_enable_preemption_service", False)
    if config.coordinator is None:
        return _join_found(config)
    assert config.num_processes is not None and config.process_id is not None
    if config.num_processes == 1:
        return ALONE
    host, port = config.coordinator_host, config.coordinator_port
    peers = _join_channel(
        config,
        config.process_id,
        config.num_processes,
        (host, config.channel_port or port + 1),
        config.channel_key(),
    )
    try:
        _initialize(
            config,
            coordinator_address=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
            cluster_detection_method="deactivate",
        )
    except BaseException as error:
        peers.fail(error)
        raise
    return peers


def _join_found(config: HostsConfig) -> Peers:
    try:
        _initialize(config)
    except ValueError as error:
        raise HostsError(
            f"jax finds no other processes here ({error}): this is no TPU pod, Slurm or MPI job "
            "that it knows; give coordinator, num_processes and process_id"
        ) from error
    num_processes, process_id = jax.process_count(), jax.process_index()
    if num_processes == 1:
        return ALONE
    listener, host, port, key = None, "", config.channel_port or 0, os.urandom(KEY_BYTES)
    if process_id == 0:
        listener, host = listen("", port), _own_address()
        port = listener.getsockname()[1]
    told = np.zeros(ADDRESS_BYTES, np.uint8)
    text = key + f"{host} {port}".encode()
    told[: len(text)] = np.frombuffer(text, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(told)).astype(np.uint8)
    host, _, port_text = told[KEY_BYTES:].tobytes().rstrip(b"\0").decode().rpartition(" ")
    address, key = (host, int(port_text)), told[:KEY_BYTES].tobytes()
    return _join_channel(config, process_id, num_processes, address, key, listener)


def _join_channel(
    config: HostsConfig,
    process_id: int,
    num_processes: int,
    address: tuple[str, int],
    key: bytes,
    listener: socket.socket | None = None,
) -> Peers:
    facts = {
        "jaxinfer": jaxinfer.__version__,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        # How often a process says that it is there follows from its own.
        "silence_s": f"{config.silence_s:g}",
    }
    links: list[Link]
    if process_id == 0:
        with listener or listen(*address) as waiting:
            links = admit_all(waiting, num_processes, key, facts, config.join_timeout_s)
    else:
        timeout_s = config.join_timeout_s
        links = [
            knock(address, process_id, num_processes, key=key, facts=facts, timeout_s=timeout_s)
        ]
    watch = Watch(links, config.silence_s)
    watch.start()
    kind = Leader if process_id == 0 else Follower
    peers = kind(watch, process_id, num_processes, config.check_steps)
    atexit.register(peers.at_exit)  # before what jax has registered
    return peers


def _initialize(config: HostsConfig, **where) -> None:
    try:
        jax.distributed.initialize(
            **where,
            initialization_timeout=max(1, round(config.join_timeout_s)),
            heartbeat_timeout_seconds=max(SERVICE_HEARTBEAT_S, round(4 * config.silence_s)),
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except RuntimeError as error:
        raise HostsError(
            f"jax.distributed did not start ({error}): is the coordinator's port free on process "
            "0, and open to the others?"
        ) from error
    # Processes share out the tuning of a GPU's program: one that found the program in a cache of
    # its own would leave the others waiting for its share.
    if jax.default_backend() == "gpu":
        jax.config.update("jax_enable_compilation_cache", False)


def _own_address() -> str:
    """By which other machines reach this one: that of its way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(BACKDROP)
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())
