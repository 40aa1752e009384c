"""Many hosts: one engine over the devices of several processes, each on a machine of its own.

    process 0   scheduler, requests, the servers' doors    announces each call, then makes it
    others      the same weights, programs and devices     make each call as it arrives

Every process runs the same compiled programs in the same order on one global mesh
(`jax.distributed`). Process 0 alone plans; what it gives its programs besides weights and state is
numpy, O(tokens) bytes a step (`batch.py`), and `Peers` sends just that to the others, which give it
to theirs (`follow`). What programs return is the same on every device, so process 0 reads its own.

**The channel** is one TCP connection from each process to process 0 (`links.py`). Not a collective
of the devices: a plan would queue behind the step that they are computing, and whoever waits for a
collective cannot notice that its partner is gone. Not the key-value store of `jax.distributed`
either: it is jax's own, without a promise for others, and a call through it takes a server's turn.
A plan of 2 kB reaches the other process's main thread well within a millisecond (docs/scaling.md).

**Out of step.** Every process hashes what it calls its programs with; every `check_steps` steps the
hashes are compared. All agree beforehand on versions, model, configuration and the number of pages.

**Death.** Each process watches its connections in a thread of their own. One that closes, or sends
nothing for `silence_s`, ends every process with `EXIT_LOST` and a line that names the lost one:
their main threads may be blocked in a collective that will never end.

Not here: going on with fewer hosts, replicas over hosts (run a server each), encoders.
"""

from jaxinfer.parallel.hosts.config import HostsConfig
from jaxinfer.parallel.hosts.following import follow
from jaxinfer.parallel.hosts.links import EXIT_LOST, HostsError
from jaxinfer.parallel.hosts.peers import ALONE, Peers
from jaxinfer.parallel.hosts.start import join

__all__ = ["ALONE", "EXIT_LOST", "HostsConfig", "HostsError", "Peers", "follow", "join"]
