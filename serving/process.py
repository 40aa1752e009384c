"""The server's process: from a checkpoint's name to an exit code.

    check options, bind ports -> load, compile -> SERVING ... signal -> drain -> exit

**Start.** Whatever can be wrong with the options (packages, keys, certificates, ports) is found
before the model is loaded. The HTTP port answers while it loads (see `startup`); gRPC's is
checked, and answers once the programs are compiled. When requests are taken, one line of JSON goes
to stdout: the addresses. Everything else goes to stderr.

**End.** Exit codes:

* 0: SIGTERM or SIGINT; what was under way has finished, or was cut after `serving.drain_s`. While
  the model is still loading there is nothing to finish, and the end is at once.
* 128 + signal (130, 143): a second signal; what was under way is lost.
* 70: the engine is lost (its thread died, a step did not return in `serving.watchdog_s`, or one of
  the other processes that the model runs on is lost).
  Requests under way end with that reason, new ones are refused, the stacks of all threads are on
  stderr, and the process ends within `LAST_RESORT_S`, even where the event loop is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from absl import logging

from jaxinfer import ConfigError, Embedder, Engine, EngineConfig, Replicas
from jaxinfer.build import about_cache, about_mesh, about_weights, load_model
from jaxinfer.execution.host_tuning import calm_collector, compute_behind_serving
from jaxinfer.loading.checkpoint import GenerationDefaults
from jaxinfer.parallel.hosts import ALONE, HostsError, Peers
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import ServingConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.grpc_server import GrpcServer, build_grpc_server
from jaxinfer.serving.grpc_tls import server_credentials
from jaxinfer.serving.health import Health, State
from jaxinfer.serving.http.app import build_app
from jaxinfer.serving.http.server import HttpServer, build_http_server
from jaxinfer.serving.loop import EngineLoop
from jaxinfer.serving.metrics import Metrics
from jaxinfer.serving.request_log import request_log_observer, write_request_log
from jaxinfer.serving.service import Service
from jaxinfer.serving.startup import StartupApp, check_port, port_errors
from jaxinfer.serving.watchdog import Watchdog

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # which end the server
EXIT_DEAD = 70  # EX_SOFTWARE of sysexits.h
GRACE_S = 3.0  # for the last bytes of answers, and for errors, to reach their clients
STOP_S = 10.0  # for the engine's thread to end, once nothing is under way
LAST_RESORT_S = 8.0  # from a death to the end of the process, whatever hangs


def serve(
    model: str, engine_config: EngineConfig, config: ServingConfig, peers: Peers = ALONE
) -> int:
    """Serve until a signal or a death; the exit code. For the main thread, once a process, of
    `peers` for process 0.

    Raises `ConfigError`, `CheckpointError` or `OSError`, which name what is wrong and the way out.
    After a death, and on a second signal, it does not return: the process ends.
    """
    server = _Server(model, engine_config, config, peers)
    with _handlers_kept(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(server.run())


class _Server:
    def __init__(
        self, model: str, engine_config: EngineConfig, config: ServingConfig, peers: Peers
    ):
        self._peers = peers
        self._model = model
        self._engine_config = engine_config
        self._config = config
        self._shutdown_requested = asyncio.Event()  # to end
        self._signal: int | None = None
        self._death: str | None = None
        self._events: asyncio.AbstractEventLoop
        self._loop: EngineLoop
        self._watchdog: Watchdog
        self._tracing: Any = None  # its package may be missing
        self._grpc: GrpcServer | None = None
        self._grpc_port: int | None = None
        self._health = Health()
        self._metrics = Metrics(self._health)
        self._keys = ApiKeys.from_file(config.api_keys_file) if config.api_keys_file else None
        server_credentials(config.tls)  # for its checks: uvicorn reads the same files
        self._make_tracing = _tracing_maker(config)
        self._startup = StartupApp(self._health)
        self._http: HttpServer | None = None
        self._http_port: int | None = None

    async def run(self) -> int:
        self._events = asyncio.get_running_loop()
        self._peers.on_lost(self._on_lost)
        for number in SIGNALS:
            self._events.add_signal_handler(number, self._on_signal, number)
        try:
            await self._take_ports()
            engine, generation = await _in_daemon_thread(self._load)
            await self._open(engine, generation)
        except BaseException:
            if self._http is not None:
                await self._http.stop(GRACE_S)
            raise
        await self._shutdown_requested.wait()
        return await self._end()

    async def _take_ports(self) -> None:
        config = self._config
        if config.http_port is not None:
            http = build_http_server(self._startup, config)
            with port_errors(config.host, config.http_port, "serving.http_port"):
                self._http_port = await http.start()
            self._http = http
        if config.grpc_port is not None:  # gRPC listens later, in its own way; can it?
            check_port(config.host, config.grpc_port, "serving.grpc_port")

    def _load(self) -> tuple[Engine | Replicas | Embedder, GenerationDefaults]:
        return load_model(
            self._model,
            self._engine_config,
            show_progress=sys.stderr.isatty(),
            on_loaded=lambda engine: _print_status(_plan(engine)),
            peers=self._peers,
        )

    async def _open(
        self, engine: Engine | Replicas | Embedder, generation: GenerationDefaults
    ) -> None:
        """From a warm engine to doors that take requests."""
        config = self._config
        write_request_log(sys.stderr)
        self._tracing = self._make_tracing(config.model_name or engine.name)
        observers = [self._metrics.observer, request_log_observer(config)]
        if self._tracing is not None:
            observers.append(self._tracing.observer)
        self._loop = loop = EngineLoop(
            engine,
            config.limits,
            observers=tuple(observers),
            on_fatal=self._on_engine_death,
        )
        service = Service(engine, loop, generation=generation, model_name=config.model_name)
        self._metrics.watch(loop, service.model.name)
        calm_collector()
        compute_behind_serving()
        loop.start()
        self._watchdog = Watchdog(loop, config.watchdog_s, self._on_failure)
        self._watchdog.start()
        if config.grpc_port is not None:
            self._grpc = build_grpc_server(service, config, self._keys, self._health, self._metrics)
            self._grpc_port = await self._grpc.start()
        if self._http is not None:
            app = build_app(service, config, self._keys, self._health, self._metrics)
            self._startup.app = app
        self._health.set(State.SERVING)
        has_page = config.page and not isinstance(engine, Embedder)
        self._announce(service.model.name, has_page=has_page)

    def _announce(self, model_name: str, *, has_page: bool) -> None:
        """The addresses: a line of JSON for programs, one of text for people."""
        host, scheme = _reachable(self._config.host), "http"
        if self._config.tls.certificate is not None:
            scheme = "https"
        http = None if self._http_port is None else f"{scheme}://{host}:{self._http_port}"
        grpc = None if self._grpc_port is None else f"{host}:{self._grpc_port}"
        about = {"http": http, "grpc": grpc, "model": model_name, "pid": os.getpid()}
        print(json.dumps(about), flush=True)
        places = [
            f"page {http}/" if http and has_page else None,
            f"API {http}/v1" if http else None,
            f"gRPC {grpc}" if grpc else None,
        ]
        _print_status(f"serving {model_name}: " + ", ".join(place for place in places if place))

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._signal is not None:
            _print_status(f"{name} again: stopping at once")
            _exit_now(128 + number)
        self._signal = number
        if self._health.state is State.STARTING:
            _print_status(f"{name} while the model was loading: stopping")
            self._peers.stop()
            self._peers.close()
            _exit_now(0)
        num, drain_s = self._loop.num_streams, self._config.drain_s
        _print_status(
            f"{name}: draining for at most {drain_s:g} s, {num} under way; again to stop at once"
        )
        self._shutdown_requested.set()

    def _on_failure(self, reason: str) -> None:
        """In the watchdog's thread: the event loop may be stuck, so the stacks are dumped here."""
        if self._death is not None:  # told already: what died has ended its thread since
            return
        _dump_stacks(reason)
        self._arm_kill_timer()
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the end is near
            self._events.call_soon_threadsafe(self._on_fatal, reason)

    def _on_lost(self, reason: str) -> None:
        """In the thread that watches the other processes: a step may wait for a lost one for good,
        so that its requests are ended from here."""
        _print_status(reason)
        if self._health.state is State.STARTING:
            _exit_now(EXIT_DEAD)
        self._arm_kill_timer()
        with contextlib.suppress(RuntimeError):
            self._events.call_soon_threadsafe(self._on_fatal, reason)

    def _on_engine_death(self, error: BaseException) -> None:
        """The engine's thread has died; called in the event loop. Of another process `_on_lost`
        tells, and no stack here explains it."""
        if self._death is None:
            reason = f"{type(error).__name__}: {error}"
            if not isinstance(error, HostsError):
                _dump_stacks(reason)
            self._arm_kill_timer()
            self._on_fatal(reason)

    def _on_fatal(self, reason: str) -> None:
        self._death = self._death or reason
        self._health.set(State.DEAD)
        text = f"the engine has stopped ({reason}); send the request again, to another server"
        self._loop.fail(ServiceError(ErrorKind.INTERNAL, text))
        self._shutdown_requested.set()

    def _arm_kill_timer(self) -> None:
        timer = threading.Timer(LAST_RESORT_S, os._exit, (EXIT_DEAD,))
        timer.daemon = True
        timer.start()

    async def _end(self) -> int:
        """The order of the end; an engine that dies on the way only shortens it."""
        # 1. Probes and balancers look elsewhere, and what still comes is refused.
        self._health.set(State.DRAINING)
        # 2. What is under way finishes, or is cut. After a death it has failed already.
        if not await self._loop.drain(self._config.drain_s):
            _print_status(f"requests were cut after {self._config.drain_s:g} s")
        # 3. The doors: what clients have not read yet goes out.
        doors = [door for door in (self._http, self._grpc) if door is not None]
        await asyncio.gather(*(door.stop(GRACE_S) for door in doors))
        # 4. The engine, unwatched from here on since its thread is to end.
        self._watchdog.close()
        await self._stop_engine()
        # 5. The last traces.
        if self._tracing is not None:
            closing = asyncio.create_task(_in_daemon_thread(self._tracing.close))
            await asyncio.wait((closing,), timeout=GRACE_S)
        if self._death is not None:
            _print_status(f"ended with exit code {EXIT_DEAD}: {self._death}")
            _exit_now(EXIT_DEAD)  # a thread may be stuck inside a step: nothing may wait for it
        _print_status("ended")
        return 0

    async def _stop_engine(self) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await self._loop.stop()
        except TimeoutError:
            if self._death is None:  # else it waits, for good, for what died
                self._death = f"the engine's thread did not end in {STOP_S:g} s"
                _dump_stacks(self._death)


def _tracing_maker(config: ServingConfig) -> Callable[[str], Any]:
    """Makes the tracing of a model's name, or None; `ConfigError` if its packages are missing."""
    endpoint = config.otlp_endpoint
    if endpoint is None:
        return lambda model_name: None
    try:
        from jaxinfer.serving.tracing import otlp_tracing  # an extra of its own
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serving.otlp_endpoint is {endpoint!r}, but the package {error.name} is missing; "
            "pip install 'jaxinfer[tracing]', or leave it unset"
        ) from error
    return lambda model_name: otlp_tracing(endpoint, model_name=model_name)


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, but the process may end while it runs."""
    events = asyncio.get_running_loop()
    future: asyncio.Future[T] = events.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome = function(), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            events.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """What signals did before, they do afterwards: uvloop, once closed, would swallow them."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where there is one for this system: it moves more bytes a second."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _plan(engine: Engine | Replicas | Embedder) -> str:
    model = engine.model
    about = f"{engine.name}: {about_weights(engine)}; computed as {model.numerics.dtype.name}"
    if isinstance(engine, Embedder):
        return (
            f"{about}, vectors of {engine.dim} numbers, texts of up to {engine.max_model_len} "
            f"tokens, "
            f"{engine.num_programs} programs; compiling"
        )
    most = f"up to {engine.config.max_running} requests at once"
    parts = [about, about_mesh(engine), about_cache(engine), most, "compiling"]
    return "; ".join(part for part in parts if part)


def _reachable(host: str) -> str:
    """The address by which this machine reaches itself, as it stands in a URL."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _print_status(text: str) -> None:
    print(f"jaxinfer: {text}", file=sys.stderr, flush=True)


def _dump_stacks(reason: str) -> None:
    _print_status(f"{reason}; the stacks of all threads:")
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def _exit_now(code: int) -> NoReturn:
    """End the process now, whatever its threads do."""
    with contextlib.suppress(OSError):  # nobody may be reading any more
        sys.stdout.flush()
        sys.stderr.flush()
    logging.flush()
    os._exit(code)
