"""Multi-host inference: one engine over the devices of several processes, one process per machine.

    process 0   runs the scheduler and the servers; announces each program call, then makes it
    others      hold the same programs and their shards of the weights; repeat each announced call

Every process runs the same compiled programs in the same order on one global mesh
(`jax.distributed`). Process 0 alone plans. Besides weights and state, the inputs of its programs
are numpy arrays of O(tokens) bytes a step (`batch.py`). `Peers` sends them to the other processes,
which pass them to their own programs (`follow`). The outputs are the same on every device, so
process 0 reads its own copy.

**The channel** is one TCP connection from each process to process 0 (`channel.py`). It is not a
collective of the devices: a plan would queue behind the step in progress, and a process blocked in
a collective cannot notice that a peer is gone. Nor is it the key-value store of `jax.distributed`,
which is internal to jax and handles each call through a server thread. A plan of 2 kB reaches the
other process's main thread well within a millisecond (docs/scaling.md).

**Divergence.** Every process hashes the inputs of its program calls; the hashes are compared every
`check_steps` steps. Before the first step all processes agree on versions, model, configuration
and the number of pages.

**Failure.** Each process monitors its connections in a separate thread. When a connection closes,
or is silent for `heartbeat_timeout_s`, every process exits with `EXIT_LOST` and an error that
names the lost process: the main threads may be blocked in a collective that will never finish.

Not supported: continuing with fewer hosts, replicas over several hosts (run one server per
replica), and encoders.
"""

from jaxinfer.parallel.hosts.channel import EXIT_LOST, HostsError
from jaxinfer.parallel.hosts.config import HostsConfig
from jaxinfer.parallel.hosts.follower import follow
from jaxinfer.parallel.hosts.peers import ALONE, Peers
from jaxinfer.parallel.hosts.start import join

__all__ = ["ALONE", "EXIT_LOST", "HostsConfig", "HostsError", "Peers", "follow", "join"]
