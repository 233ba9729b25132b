"""The composition root: builds the rooms, starts them in order, drains, and stops them in reverse.

Order: lock, engine, paths, calibration, store, pump, attach socket, gRPC, telemetry, dial ourselves, READY. Owns every
task and lifetime of the daemon; nothing else starts threads or servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import select
import signal
from collections.abc import Callable
from importlib import metadata
from typing import Any

import aiofiles
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from offloadd.client.endpoint import check_loopback
from offloadd.config import Config
from offloadd.control.data_service import DataService
from offloadd.control.describe import DaemonFacts, describe
from offloadd.control.lifecycle import Lifecycle
from offloadd.control.service import Authenticator, ControlService, hello
from offloadd.core.clock import MonotonicClock
from offloadd.core.errors import Code, ConfigError, OffloadError
from offloadd.core.stats import Snapshot
from offloadd.core.units import human
from offloadd.io.select import choose_engine
from offloadd.lockfile import LockFile
from offloadd.loop import PumpLoop
from offloadd.pump import Pump
from offloadd.scheduler.scheduler import Scheduler
from offloadd.session.attach import AttachServer, remove_stale
from offloadd.session.peer import Peer
from offloadd.session.registry import Registry
from offloadd.store.catalog import Catalog
from offloadd.store.store import Store
from offloadd.telemetry.collectors import render
from offloadd.telemetry.http import Heartbeat, TelemetryServer
from offloadd.volumes import Volumes
from offloadd.wire.pb import control_pb2_grpc, data_pb2_grpc

log = logging.getLogger("offloadd.node")

SERVICE = "offloadd.v1.ControlService"
MESSAGE_BYTES_MAX = 16 << 20
STOP_GRACE_SECONDS = 2.0
SOCKET_PATH_BYTES_MAX = 107 - len(".attach")
"""What the kernel takes for a Unix socket's name, less what the attach socket appends."""
CATALOG_NAME = "catalog.sqlite"
LOOK_SECONDS = 0.2
"""How often a private daemon looks whether it is still needed."""


class Node:
    """One daemon, from start to stop. `close` undoes whatever `start` got done, in reverse."""

    def __init__(self, config: Config, starter_fd: int = -1) -> None:
        """`starter_fd`: pidfd of the process that starts a private daemon, or -1."""
        self._config = config
        self._starter_fd = starter_fd
        self._clock = MonotonicClock()
        self._exits = contextlib.AsyncExitStack()
        self._heartbeat = Heartbeat()
        self._stop = asyncio.Event()
        self.failure: Exception | None = None
        """A bug that stopped the pump."""
        self._snapshot: Snapshot | None = None

    async def start(self) -> None:
        """Everything up to READY. OffloadError, one sentence, if something stands against it."""
        config = self._config
        log.info("configuration: %s", config.model_dump_json())
        if config.control.listen:
            check_loopback(config.control.listen, "control.listen")
        _check_memory(config.memory.host_bytes)
        _check_socket_path(config.control.socket)
        self._exits.callback(LockFile(config.control.socket + ".lock", config.control.socket).release)
        self._engine, refusals = await asyncio.to_thread(
            choose_engine, config.io.engine, config.io.driver, config.io.checksum_threads
        )
        self._exits.callback(self._engine.close)
        notes = tuple(f"{refusal.candidate} is not used: {refusal.why}" for refusal in refusals)
        for note in notes:
            log.warning("%s", note)
        log.info("engine %s, driver %s", self._engine.name, self._engine.driver)
        await self._build_rooms()
        await self._open_doors()
        self._start_telemetry(notes)
        await self._dial_ourselves()
        self._heartbeat.ready = True
        await self._health_servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)

    async def _build_rooms(self) -> None:
        config = self._config
        wake: list[Callable[[], None]] = []
        catalog = _open_catalog(config.session.state_dir, lambda: wake[0]() if wake else None)
        self._exits.callback(catalog.close)
        self._volumes = Volumes(config.swap, config.io, self._engine)
        self._exits.callback(self._volumes.close)
        await self._volumes.open(catalog)
        self._store = Store(catalog)
        self._scheduler = Scheduler(self._volumes.windows())
        wait_ns = int(config.session.slot_wait_seconds * 1e9)
        self._pump = Pump(self._store, self._scheduler, self._engine, self._clock, config.io.checksums, wait_ns)
        for index, facts in enumerate(self._volumes.facts):
            self._pump.stats.set_bandwidth(index, facts.mixed_bps)
        self._registry = Registry(
            config.memory.host_bytes, self._volumes.available_bytes(), config.session.sessions_max, self._clock.now_ns
        )
        self._loop = PumpLoop(self._pump, self._engine, self._clock, self._tick, self._pump_failed)
        wake.append(self._loop.kick_threadsafe)
        self._lifecycle = Lifecycle(
            self._registry,
            self._store,
            self._scheduler,
            self._pump,
            self._engine,
            self._volumes.open_job,
            self._loop,
            self._clock,
            config.session.attach_seconds,
        )
        self._pump.on_broken = self._lifecycle.broken
        self._loop.start()
        self._exits.callback(self._loop.stop)
        self._exits.push_async_callback(self._lifecycle.close_all, "the daemon stops")

    async def _open_doors(self) -> None:
        config = self._config.control
        mode = 0o660 if config.group_access else 0o600
        self._attach = AttachServer(
            config.socket + ".attach", self._lifecycle.descriptors, self._lifecycle.connection_lost, self._may_connect
        )
        self._attach.start(mode)
        self._exits.callback(self._attach.close)
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
        ]
        server = grpc.aio.server(options=options)
        token = await _token(config.token_file or config.socket + ".token") if config.listen else ""
        authenticator = Authenticator(self._attach, token)
        greeting = hello(
            self._engine.name,
            self._engine.driver,
            [facts.directory for facts in self._volumes.facts],
            self._config.lifetime.private,
        )
        control_pb2_grpc.add_ControlServiceServicer_to_server(
            ControlService(self._lifecycle, authenticator, self._describe, greeting), server
        )
        data_pb2_grpc.add_DataServiceServicer_to_server(
            DataService(self._lifecycle, authenticator, self._loop.kick), server
        )
        self._health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health_servicer, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        self._listen_port = self._bind(server, mode)
        await server.start()
        self._exits.push_async_callback(server.stop, STOP_GRACE_SECONDS)

    def _bind(self, server: grpc.aio.Server, mode: int) -> int:
        config = self._config.control
        remove_stale(config.socket)  # we hold the lock, so nobody listens there
        umask = os.umask(0o777 & ~mode)
        try:
            server.add_insecure_port(f"unix:{config.socket}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {config.socket}: {error}") from error
        finally:
            os.umask(umask)
        if not config.listen:
            return 0
        try:
            return server.add_insecure_port(config.listen)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {config.listen}; choose another control.listen ({error})") from error

    def _may_connect(self, peer: Peer) -> bool:
        return self._config.control.group_access or peer.uid in (0, os.getuid())

    def _start_telemetry(self, notes: tuple[str, ...]) -> None:
        config = self._config
        metrics = ""
        if config.telemetry.listen:
            check_loopback(config.telemetry.listen, "telemetry.listen")
            host, _, port = config.telemetry.listen.rpartition(":")
            try:
                server = TelemetryServer(host.strip("[]"), int(port), self._render, self._heartbeat)
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {config.telemetry.listen}: {error.strerror}; set telemetry.listen to a free "
                    "port, or to none"
                ) from error
            server.start()
            self._exits.callback(server.close)
            metrics = f"http://{host}:{server.port}/metrics"
        host = (config.control.listen or "").rpartition(":")[0]
        self._facts = DaemonFacts(
            version=metadata.version("offloadd"),
            pid=os.getpid(),
            endpoint=f"unix://{config.control.socket}",
            listen=f"grpc://{host}:{self._listen_port}" if config.control.listen else "",
            metrics=metrics,
            engine=self._engine.name,
            driver=self._engine.driver,
            engine_notes=notes,
            checksums=config.io.checksums,
            paths=tuple(self._volumes.facts),
            started_ns=self._clock.now_ns(),
        )

    async def _dial_ourselves(self) -> None:
        """READY is said only after a call through the socket was answered."""
        async with grpc.aio.insecure_channel(f"unix:{self._config.control.socket}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                raise OffloadError(
                    Code.UNAVAILABLE,
                    f"the daemon cannot reach its own socket {self._config.control.socket}: {error.details()}",
                ) from error

    # ---- running -------------------------------------------------------------------------------------------------
    def request_stop(self) -> None:
        self._stop.set()

    async def serve(self) -> None:
        """Until a signal, or until a private daemon has nobody left to serve."""
        lifetime = self._config.lifetime
        while not self._stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), LOOK_SECONDS)
            if not lifetime.private or self._lifecycle.session_count():
                continue
            if not self._lifecycle.sessions_opened and self._starter_ended():
                log.info("whoever started this private daemon has ended before any session, and so does it")
                return
            patience = lifetime.first_session_seconds
            if self._lifecycle.sessions_opened:
                # A job that said goodbye is over; one whose ranks died may be on its way back.
                patience = 0.0 if self._lifecycle.ended_cleanly else lifetime.grace_seconds
            if self._clock.now_ns() - self._lifecycle.idle_since_ns >= patience * 1e9:
                log.info("no session for %g s: this private daemon ends", patience)
                return
        if self.failure is not None:
            raise self.failure

    def _pump_failed(self, error: Exception) -> None:
        self.failure = error
        self._stop.set()

    def _starter_ended(self) -> bool:
        """Nobody else may know of this daemon before its first session."""
        if self._starter_fd < 0:
            return False
        poller = select.poll()
        poller.register(self._starter_fd, select.POLLIN)
        return bool(poller.poll(0))

    async def drain(self) -> None:
        """No new sessions; give ranks `drain_seconds` to leave."""
        self._lifecycle.draining = True
        self._heartbeat.ready = False
        await self._health_servicer.enter_graceful_shutdown()
        if not await self._lifecycle.wait_empty(self._config.lifetime.drain_seconds):
            log.warning("%d sessions did not leave in time and are closed", self._lifecycle.session_count())

    async def close(self) -> None:
        await self._exits.aclose()

    def _tick(self) -> None:
        self._heartbeat.beat()
        if self._config.telemetry.listen:  # nobody else looks at it
            self._snapshot = self._pump.snapshot()

    def _describe(self) -> dict[str, Any]:
        return describe(self._facts, self._registry, self._pump.snapshot(), self._heartbeat.ready)

    def _render(self) -> bytes:
        snapshot = self._snapshot
        return render(snapshot, self._facts) if snapshot is not None else b""


def _check_socket_path(path: str) -> None:
    """The attach socket's name is the longer one."""
    size = len(os.fsencode(path))
    if not path or "\0" in path or size > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"control.socket is {path!r}, of {size} bytes; give a path of 1 to {SOCKET_PATH_BYTES_MAX} bytes"
        )


def _open_catalog(state: str | None, wake: Callable[[], None]) -> Catalog:
    if state is None:
        return Catalog(":memory:", wake)
    if not os.path.isdir(state):
        raise ConfigError(f"session.state_dir {state} is not a directory; create it, or leave the key out")
    return Catalog(os.path.join(state, CATALOG_NAME), wake)


def _check_memory(host_bytes: int) -> None:
    """What is promised to ranks must exist."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if host_bytes > total:
        raise ConfigError(
            f"memory.host_bytes is {human(host_bytes)}, but this machine has {human(total)} in all; lower it, "
            "and leave room for the ranks"
        )


async def _token(path: str) -> str:
    """The token's file is made on first use, readable by its owner only. It may lie on a slow file system."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        async with aiofiles.open(descriptor, "r+") as file:
            if os.fstat(descriptor).st_mode & 0o077:
                raise ConfigError(f"token file {path} is open to others; chmod it 600")
            token = (await file.read()).strip()
            if not token:
                token = secrets.token_hex(32)
                await file.write(token + "\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot use the token file {path}: {why}; set control.token_file to another") from error
    return token


async def run(config: Config, ready: Callable[[], bool], starter_fd: int = -1) -> None:
    """Start, serve until told to stop, drain, stop. `ready` is False when whoever waited for that is gone."""
    node = Node(config, starter_fd)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.request_stop)
    try:
        await node.start()
        if not ready() and config.lifetime.private:
            log.warning("whoever started this private daemon has ended meanwhile, and so does it")
            node.request_stop()
        log.info("READY on %s, %s of memory to lend", config.control.socket, human(config.memory.host_bytes))
        await node.serve()
        await node.drain()
    finally:
        if node.failure is None:
            await node.close()
    log.info("stopped")
