"""The server's process, from a checkpoint's name to an exit code.

    check options, bind ports -> load, compile -> SERVING ... signal -> drain -> exit

**Startup.** All errors in the options (packages, keys, certificates, ports) are found before the
model is loaded. The HTTP port answers while the model loads (see `startup`); the gRPC port is
checked, and answers once the programs are compiled. When requests are accepted, one line of JSON
with the addresses is written to stdout. All other output goes to stderr.

**Shutdown.** The exit codes are:

* 0: SIGTERM or SIGINT; unfinished requests have finished, or were cut off after `serving.drain_s`.
  While the model is still loading there is nothing to finish, and the process exits at once.
* 128 + signal (130, 143): a second signal; unfinished requests are lost.
* 70: the engine is lost (its thread failed, a step did not return in `serving.watchdog_s`, or one
  of the other processes that run the model is lost). Unfinished requests fail with that reason, new
  ones are refused, the stacks of all threads are written to stderr, and the process ends within
  `KILL_S`, even if the event loop is blocked.
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

from jaxinfer import ConfigError, EngineConfig, EngineLike
from jaxinfer.build import describe_cache, describe_mesh, describe_weights, load_model
from jaxinfer.execution.host_tuning import lower_compute_priority, tune_gc
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

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # these end the server
EXIT_FATAL = 70  # EX_SOFTWARE of sysexits.h
GRACE_S = 3.0  # for the last bytes of responses, and for errors, to reach the clients
STOP_S = 10.0  # for the engine's thread to end once it has no requests
KILL_S = 8.0  # from a fatal error to the end of the process, even if a thread hangs


def serve(
    model: str, engine_config: EngineConfig, config: ServingConfig, peers: Peers = ALONE
) -> int:
    """Serve until a signal or a fatal error; returns the exit code.

    It is for the main thread, once a process, and of several processes (`peers`) for process 0.
    Raises `ConfigError`, `CheckpointError` or `OSError`, which name the problem and the way out.
    After a fatal error, and on a second signal, it does not return: the process ends.
    """
    server = _Server(model, engine_config, config, peers)
    with _restored_signal_handlers(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(server.run())


class _Server:
    def __init__(
        self, model: str, engine_config: EngineConfig, config: ServingConfig, peers: Peers
    ):
        self._peers = peers
        self._model = model
        self._engine_config = engine_config
        self._config = config
        self._shutdown_requested = asyncio.Event()
        self._signal: int | None = None
        self._fatal_lock = threading.Lock()
        self._fatal_reason: str | None = None
        self._event_loop: asyncio.AbstractEventLoop
        self._loop: EngineLoop
        self._watchdog: Watchdog
        self._tracing: Any = None  # `Tracing`, whose package may be missing
        self._grpc: GrpcServer | None = None
        self._grpc_port: int | None = None
        self._health = Health()
        self._metrics = Metrics(self._health)
        self._keys = ApiKeys.from_file(config.api_keys_file) if config.api_keys_file else None
        server_credentials(config.tls)  # for its checks; uvicorn reads the same files
        self._make_tracing = _tracing_maker(config)
        self._startup = StartupApp(self._health)
        self._http: HttpServer | None = None
        self._http_port: int | None = None

    async def run(self) -> int:
        self._event_loop = asyncio.get_running_loop()
        self._peers.on_lost(self._on_peer_lost)
        for number in SIGNALS:
            self._event_loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._bind_ports()
            engine, generation = await _in_daemon_thread(self._load)
            await self._open(engine, generation)
        except BaseException:
            if self._http is not None:
                await self._http.stop(GRACE_S)
            raise
        await self._shutdown_requested.wait()
        return await self._end()

    async def _bind_ports(self) -> None:
        config = self._config
        if config.http_port is not None:
            http = build_http_server(self._startup, config)
            with port_errors(config.host, config.http_port, "serving.http_port"):
                self._http_port = await http.start()
            self._http = http
        if config.grpc_port is not None:  # gRPC binds its port itself, once it can answer
            check_port(config.host, config.grpc_port, "serving.grpc_port")

    def _load(self) -> tuple[EngineLike, GenerationDefaults]:
        return load_model(
            self._model,
            self._engine_config,
            show_progress=sys.stderr.isatty(),
            on_loaded=lambda engine: _print_status(_describe_engine(engine)),
            peers=self._peers,
        )

    async def _open(self, engine: EngineLike, generation: GenerationDefaults) -> None:
        """Start the loop and the servers around a warm engine."""
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
            on_fatal=self._on_engine_error,
        )
        service = Service(engine, loop, generation=generation, model_name=config.model_name)
        self._metrics.watch(loop, service.model.name)
        tune_gc()
        lower_compute_priority()
        loop.start()
        self._watchdog = Watchdog(loop, config.watchdog_s, self._on_watchdog)
        self._watchdog.start()
        if config.grpc_port is not None:
            self._grpc = build_grpc_server(service, config, self._keys, self._health, self._metrics)
            self._grpc_port = await self._grpc.start()
        if self._http is not None:
            app = build_app(service, config, self._keys, self._health, self._metrics)
            self._startup.app = app
        self._health.set(State.SERVING)
        has_page = config.page and engine.can_generate
        self._announce(service.model.name, has_page=has_page)

    def _announce(self, model_name: str, *, has_page: bool) -> None:
        """Print the addresses: one line of JSON for programs, one of text for people."""
        host, scheme = _reachable(self._config.host), "http"
        if self._config.tls.certificate is not None:
            scheme = "https"
        http = None if self._http_port is None else f"{scheme}://{host}:{self._http_port}"
        grpc = None if self._grpc_port is None else f"{host}:{self._grpc_port}"
        addresses = {"http": http, "grpc": grpc, "model": model_name, "pid": os.getpid()}
        print(json.dumps(addresses), flush=True)
        endpoints = [
            f"page {http}/" if http and has_page else None,
            f"API {http}/v1" if http else None,
            f"gRPC {grpc}" if grpc else None,
        ]
        _print_status(f"serving {model_name}: " + ", ".join(filter(None, endpoints)))

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
            f"{name}: draining {num} requests for at most {drain_s:g} s; send it again to stop now"
        )
        self._shutdown_requested.set()

    def _on_watchdog(self, reason: str) -> None:
        """Called in the watchdog's thread: the event loop may be blocked."""
        self._report_fatal(reason)

    def _on_peer_lost(self, reason: str) -> None:
        """Called in the thread that watches the other processes: a step may wait for a lost one
        forever, so its requests have to be ended from here."""
        _print_status(reason)
        if self._health.state is State.STARTING:
            _exit_now(EXIT_FATAL)
        self._report_fatal(reason, with_stacks=False)

    def _on_engine_error(self, error: BaseException) -> None:
        """Called in the event loop when the engine's thread has failed. `_on_peer_lost` prints the
        loss of another process, which no stack here would explain."""
        is_local = not isinstance(error, HostsError)
        self._report_fatal(f"{type(error).__name__}: {error}", with_stacks=is_local)

    def _report_fatal(self, reason: str, *, with_stacks: bool = True) -> None:
        """Fail all requests and shut down. Only the first report has an effect. For any thread."""
        with self._fatal_lock:
            if self._fatal_reason is not None:
                return
            self._fatal_reason = reason
        if with_stacks:
            _dump_stacks(reason)
        self._arm_kill_timer()
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the process is ending
            self._event_loop.call_soon_threadsafe(self._fail_requests, reason)

    def _fail_requests(self, reason: str) -> None:
        self._health.set(State.DEAD)
        text = f"the engine has stopped ({reason}); send the request again, to another server"
        self._loop.fail(ServiceError(ErrorKind.INTERNAL, text))
        self._shutdown_requested.set()

    def _arm_kill_timer(self) -> None:
        timer = threading.Timer(KILL_S, os._exit, (EXIT_FATAL,))
        timer.daemon = True
        timer.start()

    async def _end(self) -> int:
        """Shut down in order; a fatal error on the way only shortens it. Returns the exit code."""
        # 1. Probes and load balancers turn away, and new requests are refused.
        self._health.set(State.DRAINING)
        # 2. Unfinished requests finish or are cut off; after a fatal error they have failed.
        if not await self._loop.drain(self._config.drain_s):
            _print_status(f"requests were cut off after {self._config.drain_s:g} s")
        # 3. The HTTP and gRPC servers send what their clients have not read yet.
        servers = [server for server in (self._http, self._grpc) if server is not None]
        await asyncio.gather(*(server.stop(GRACE_S) for server in servers))
        # 4. The engine's thread ends; the watchdog would take that for a failure.
        self._watchdog.close()
        await self._stop_engine()
        # 5. The last traces are sent.
        if self._tracing is not None:
            closing = asyncio.create_task(_in_daemon_thread(self._tracing.close))
            await asyncio.wait((closing,), timeout=GRACE_S)
        if self._fatal_reason is not None:
            _print_status(f"ended with exit code {EXIT_FATAL}: {self._fatal_reason}")
            _exit_now(EXIT_FATAL)  # a thread may hang inside a step: do not wait for it
        _print_status("ended")
        return 0

    async def _stop_engine(self) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await self._loop.stop()
        except TimeoutError:
            self._report_fatal(f"the engine's thread did not end in {STOP_S:g} s")


def _tracing_maker(config: ServingConfig) -> Callable[[str], Any]:
    """A function that creates the tracing of a model by its name, or None if it is off.

    Raises `ConfigError` if its packages are missing.
    """
    endpoint = config.otlp_endpoint
    if endpoint is None:
        return lambda model_name: None
    try:
        from jaxinfer.serving.tracing import otlp_tracing  # needs the extra `tracing`
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serving.otlp_endpoint is {endpoint!r}, but the package {error.name} is missing; "
            "pip install 'jaxinfer[tracing]', or leave it unset"
        ) from error
    return lambda model_name: otlp_tracing(endpoint, model_name=model_name)


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, but does not keep the process from ending."""
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
        with contextlib.suppress(
            RuntimeError
        ):  # the event loop is closed: nobody waits for the result
            events.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future


@contextlib.contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers at the end: a closed uvloop would swallow the signals."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's factory, if it is installed: its sockets are faster."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _describe_engine(engine: EngineLike) -> str:
    model = engine.model
    about = f"{engine.name}: {describe_weights(engine)}; computed as {model.numerics.dtype.name}"
    if not engine.can_generate:
        return (
            f"{about}, vectors of {engine.embedding_dim} numbers, texts of up to "
            f"{engine.max_model_len} tokens, {engine.num_programs} programs; compiling"
        )
    most = f"up to {engine.config.max_running} requests at once"
    parts = [about, describe_mesh(engine), describe_cache(engine), most, "compiling"]
    return "; ".join(part for part in parts if part)


def _reachable(host: str) -> str:
    """The address for a URL by which this machine reaches the server."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _print_status(text: str) -> None:
    print(f"jaxinfer: {text}", file=sys.stderr, flush=True)


def _dump_stacks(reason: str) -> None:
    _print_status(f"{reason}; the stacks of all threads:")
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def _exit_now(code: int) -> NoReturn:
    """End the process now, without waiting for its threads."""
    with contextlib.suppress(OSError):  # the reader may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    logging.flush()
    os._exit(code)
