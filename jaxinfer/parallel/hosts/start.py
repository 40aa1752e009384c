"""Start-up of several processes: the channel first, then `jax.distributed`."""

from __future__ import annotations

import atexit
import os
import socket
from importlib import metadata

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxinfer.parallel.hosts.channel import HostsError, Link, LinkMonitor
from jaxinfer.parallel.hosts.config import HostsConfig
from jaxinfer.parallel.hosts.handshake import ProcessInfo, accept_all, connect, listen
from jaxinfer.parallel.hosts.peers import ALONE, Follower, Leader, Peers
from jaxinfer.version import __version__

# jax's own service also notices a lost process; it must do so later than the channel, because it
# ends this process with pages of stack traces.
SERVICE_HEARTBEAT_S = 100
SHUTDOWN_S = 10  # how long jax waits, at a process's end, for the others to end
ADDRESS_BYTES = 256
KEY_BYTES = 32
# An address reserved for documentation (RFC 5737): nothing is sent to it.
UNUSED_ADDRESS = ("192.0.2.1", 9)


def join(config: HostsConfig) -> Peers:
    """Join the other processes; call it before anything else uses a device.

    Raises `HostsError`, naming the process that is missing or does not match. On CPUs, devices of
    several processes communicate by gloo.

    With a coordinator's address the channel is set up first, so that a process that cannot be
    reached or has another version is named before `jax.distributed` would wait for it. Where jax
    detects the processes, process 0 broadcasts its address and a random key through the devices.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Preemption notices serve training jobs, which save a checkpoint then.
    jax.config.update("jax_enable_preemption_service", False)
    if config.coordinator is None:
        return _join_detected(config)
    assert config.num_processes is not None and config.process_id is not None
    if config.num_processes == 1:
        return ALONE
    host, port = config.coordinator_host, config.coordinator_port
    peers = _join_channel(
        config,
        config.process_id,
        config.num_processes,
        address=(host, config.channel_port or port + 1),
        key=config.channel_key(),
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


def _join_detected(config: HostsConfig) -> Peers:
    try:
        _initialize(config)
    except ValueError as error:
        raise HostsError(
            f"jax detects no other processes here ({error}): this is no TPU pod, Slurm or MPI job "
            "that it knows; give coordinator, num_processes and process_id"
        ) from error
    num_processes, process_id = jax.process_count(), jax.process_index()
    if num_processes == 1:
        return ALONE
    listener, host, port, key = None, "", config.channel_port or 0, os.urandom(KEY_BYTES)
    if process_id == 0:
        listener, host = listen("", port), _own_address()
        port = listener.getsockname()[1]
    buffer = np.zeros(ADDRESS_BYTES, np.uint8)
    text = key + f"{host} {port}".encode()
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    buffer = np.asarray(multihost_utils.broadcast_one_to_all(buffer)).astype(np.uint8)
    host, _, port_text = buffer[KEY_BYTES:].tobytes().rstrip(b"\0").decode().rpartition(" ")
    address, key = (host, int(port_text)), buffer[:KEY_BYTES].tobytes()
    return _join_channel(
        config, process_id, num_processes, address=address, key=key, listener=listener
    )


def _join_channel(
    config: HostsConfig,
    process_id: int,
    num_processes: int,
    *,
    address: tuple[str, int],
    key: bytes,
    listener: socket.socket | None = None,
) -> Peers:
    facts = {
        "jaxinfer": __version__,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        # A process derives its heartbeat interval from its own timeout.
        "heartbeat_timeout_s": f"{config.heartbeat_timeout_s:g}",
    }
    timeout_s = config.join_timeout_s
    links: list[Link]
    if process_id == 0:
        with listener or listen(*address) as server:
            links = accept_all(server, num_processes, key, facts, timeout_s)
    else:
        info = ProcessInfo(process_id, num_processes, facts)
        links = [connect(address, info, key=key, timeout_s=timeout_s)]
    monitor = LinkMonitor(links, config.heartbeat_timeout_s)
    monitor.start()
    cls = Leader if process_id == 0 else Follower
    peers = cls(monitor, process_id, num_processes, config.check_steps)
    atexit.register(peers.at_exit)  # runs before the handlers that jax registered earlier
    return peers


def _initialize(config: HostsConfig, **cluster) -> None:
    heartbeat_s = max(SERVICE_HEARTBEAT_S, round(4 * config.heartbeat_timeout_s))
    try:
        jax.distributed.initialize(
            **cluster,
            initialization_timeout=max(1, round(config.join_timeout_s)),
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except RuntimeError as error:
        raise HostsError(
            f"jax.distributed did not start ({error}): is the coordinator's port free on the "
            "machine of process 0, and open to the others?"
        ) from error
    # On GPUs, XLA divides the autotuning of a program among the processes. A process that finds
    # the program in its compilation cache would leave the others waiting for its share.
    if jax.default_backend() == "gpu":
        jax.config.update("jax_enable_compilation_cache", False)


def _own_address() -> str:
    """Return the address of the interface through which this machine reaches other networks."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(UNUSED_ADDRESS)
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())
