"""After an exception inside a step, the engine starts over with a fresh cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jaxinfer.parallel.hosts import HostsError


@contextlib.contextmanager
def recovering(recover: Callable[[], None]) -> Iterator[None]:
    """Call `recover` if the block raises, Ctrl-C included, and raise the exception again.

    Nothing is recovered if another process is lost: no process is left to go on with. If that turns
    out during the recovery, it was the cause, and is raised instead.
    """
    try:
        yield
    except HostsError:
        raise
    except BaseException:
        try:
            recover()
        except HostsError as lost:
            raise lost from None
        raise
