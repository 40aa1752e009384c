"""Options of multi-host inference: addresses, the shared key and timeouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxinfer.options import ConfigError, at_least, range_problems


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """This process's place among the processes of one engine.

    Without `coordinator`, jax detects the processes itself (on a TPU pod and under Slurm or MPI);
    `num_processes` and `process_id` must then be left out too. Raises `ConfigError` for options
    that are out of range or do not go together.
    """

    coordinator: str | None = None  # HOST:PORT of process 0, as the others reach it
    num_processes: int | None = at_least(1, None)
    process_id: int | None = at_least(0, None)
    # None: the coordinator's port + 1, or any free port where jax detects the processes.
    channel_port: int | None = at_least(1, None, at_most=65535)
    channel_key_file: str | None = None  # a shared secret that a process must prove to join
    join_timeout_s: float = at_least(0.1, 300.0)  # until all processes must have joined
    heartbeat_timeout_s: float = at_least(0.1, 10.0)  # a process silent for longer is lost
    check_steps: int = at_least(1, 64)  # steps between two comparisons of hashes

    def __post_init__(self):
        problems = list(range_problems(self, ""))
        given = [self.coordinator, self.num_processes, self.process_id]
        if any(v is not None for v in given) and any(v is None for v in given):
            problems.append(
                "coordinator, num_processes and process_id go together: give all three, or none "
                "where jax detects them (a TPU pod, Slurm, MPI)"
            )
        elif self.coordinator is None and self.channel_key_file is not None:
            problems.append(
                "channel_key_file goes with coordinator: where jax detects the processes, a random "
                "key is broadcast through the devices"
            )
        elif not problems and self.coordinator is not None:
            problems += self._address_problems()
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def coordinator_host(self) -> str:
        assert self.coordinator is not None
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def coordinator_port(self) -> int:
        assert self.coordinator is not None
        return int(self.coordinator.rpartition(":")[2])

    def channel_key(self) -> bytes:
        """Read the shared key; empty without a file.

        Raises `ConfigError` if the file cannot be read or is empty.
        """
        if self.channel_key_file is None:
            return b""
        try:
            key = Path(self.channel_key_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"channel_key_file: {error}") from error
        if not key:
            raise ConfigError(f"channel_key_file {self.channel_key_file!r} is empty")
        return key

    def _address_problems(self) -> list[str]:
        assert self.coordinator and self.num_processes is not None and self.process_id is not None
        host, _, port = self.coordinator.rpartition(":")
        problems = []
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65534:
            problems.append(
                f"coordinator is {self.coordinator!r}; it must be HOST:PORT, port 1 to 65534"
            )
        if self.process_id >= self.num_processes:
            problems.append(
                f"process_id is {self.process_id} of {self.num_processes} processes; they are "
                f"numbered 0 to {self.num_processes - 1}"
            )
        return problems
