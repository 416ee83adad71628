"""Runs the daemon: recovers, serves until it is told to stop, drains."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tierkv_kernels.errors import KernelError
from tierkv_wal import WalError

from tierkv import __version__
from tierkv.config.change import Change
from tierkv.config.schema import Config
from tierkv.core.counters import Counters
from tierkv.errors import ConfigError, NotReady, TierFailed, TierkvError
from tierkv.gpu import Gpu, GpuFailed
from tierkv.obs.exporter import Exporter
from tierkv.obs.history import History
from tierkv.obs.log import setup as log_setup
from tierkv.obs.metrics import Metrics
from tierkv.obs.problems import Problems
from tierkv.obs.slow import Slow
from tierkv.obs.spans import Spans
from tierkv.obs.status import LoopStatus, StatusDocument, to_plain
from tierkv.rpc.connection import ConnectionLimits
from tierkv.rpc.listener import Listener
from tierkv.service.announce import Announcer
from tierkv.service.assembly import assemble
from tierkv.service.attempts import Attempts
from tierkv.service.ballast import Ballast
from tierkv.service.fd_store import FdStore
from tierkv.service.housekeeping import Housekeeping, keep_room, write_what_is_in_ram
from tierkv.service.last_status import write_last_status
from tierkv.service.lifecycle import DaemonState, Lifecycle
from tierkv.service.machine import Machine, RealMachine
from tierkv.service.measured import Measured
from tierkv.service.operations import Operations
from tierkv.service.progress import Progress
from tierkv.service.recovered import Recovered
from tierkv.service.recovery import recover
from tierkv.service.reload import Reloader
from tierkv.service.room import Room
from tierkv.service.runtime import (
    keep_objects,
    set_interpreter,
    watch_loop,
    watched_collector,
)
from tierkv.service.sessions import Sessions
from tierkv.service.sockets import Sockets, open_sockets, start_exporter
from tierkv.service.status import StatusReader, short_facts
from tierkv.service.store import StateDirectory
from tierkv.service.systemd import Notifier, inherited_descriptors
from tierkv.service.watchdog import feed, period_s
from tierkv.tiers.numa import choose, memory_nodes

log = logging.getLogger(__name__)
T = TypeVar("T")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_IO = 74
"""The log could not be written, or the GPU failed (EX_IOERR): recovery must sort out the rest."""
EXIT_NOT_READY = 75
"""Another process holds the store: try again when it has ended (EX_TEMPFAIL)."""
EXIT_CONFIG = 78


def run(config: Config, read: Callable[[], Config]) -> int:
    """Run the daemon until it is told to stop; returns the exit code.

    ``read`` reads the configuration anew for a reload.
    """
    faulthandler.enable()
    set_interpreter()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_Daemon(config, read).run())
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    except NotReady as error:
        log.error("%s", error)
        return EXIT_NOT_READY
    except TierkvError as error:
        log.error("%s", error)
        return EXIT_FAILED


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where it is installed (the ``fast`` extra), else asyncio's own."""
    if os.environ.get("TIERKV_LOOP") == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Daemon:
    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        self._config = config
        self._reloader = Reloader(config, read)
        self._reloader.apply = _set_up_log
        self._reloading: set[asyncio.Task[None]] = set()
        self._lifecycle = Lifecycle()
        self._counters = Counters()
        self._notifier = Notifier(os.environ.get("NOTIFY_SOCKET", ""))
        self._announcer = Announcer(self._notifier)
        self._stop = asyncio.Event()
        self._exit_code = EXIT_OK
        self._started = time.monotonic()
        self._progress = Progress()
        self._progress.tell("opening the store", 0, 0)
        self._history = History()
        self._reader: StatusReader | None = None
        self._metrics = Metrics(self._document, self._counters)
        self._problems = Problems()
        self._attempts: Attempts | None = None
        self._room = Room.of(config)
        self._slow = Slow(config.log.slow_op_s)

    async def run(self) -> int:
        self._handle_signals()
        with contextlib.ExitStack() as leaving:
            leaving.enter_context(self._problems.watching())
            self._slow = _slow(self._config, leaving)
            directory = StateDirectory.open(Path(self._config.server.state_dir))
            leaving.callback(directory.close)
            inherited = inherited_descriptors(os.environ)
            sockets = open_sockets(self._config, inherited, leaving)
            fd_store = FdStore(self._notifier, inherited)
            leaving.callback(fd_store.close)
            arena = self._config.arena
            numa = choose(arena.numa, memory_nodes())
            gpu = _gpu(self._config)
            if arena.keep == "manager":
                fd_store.require_service(os.environ)
                machine = RealMachine(fd_store, numa, gpu)
            else:
                fd_store.give_back()
                machine = RealMachine(numa=numa, gpu=gpu)
            await self._recover_and_serve(directory, sockets, machine)
        self._lifecycle.enter(DaemonState.STOPPED)
        log.info("stopped")
        return self._exit_code

    async def _recover_and_serve(
        self, directory: StateDirectory, sockets: Sockets, machine: Machine
    ) -> None:
        exporter = Exporter(
            exposition=self._metrics.exposition,
            status=lambda: to_plain(self._document()),
            history=self._history.plain,
            state=lambda: self._lifecycle.state.value,
        )
        try:
            self._lifecycle.enter(DaemonState.RECOVERING)
            await start_exporter(exporter, self._config, sockets.pages)
            # On a thread, so that health and metrics answer meanwhile. Workers that connect wait in
            # the socket's backlog until the listener runs.
            ballast = Ballast(machine.storage, str(directory.path), self._config.wal.segment_bytes)
            attempts = Attempts(directory)
            aside = attempts.set_aside(self._config.recovery.on_repeated_failure)
            with attempts.counting():
                self._attempts = attempts
                recovered = await self._while(
                    asyncio.get_running_loop().run_in_executor(
                        None, self._recover, directory, machine, ballast
                    ),
                    self._announcer.keep_asking_for_time(lambda: f"recovering: {self._progress}"),
                )
                recovered.report.quarantined += [str(path) for path in aside]
                await self._serve(recovered, ballast, sockets.workers, exporter.tcp_port)
        finally:
            await exporter.close()

    def _recover(self, directory: StateDirectory, machine: Machine, ballast: Ballast) -> Recovered:
        try:
            recovered = ballast.backing(
                lambda: recover(self._config, directory, self._progress.tell, machine)
            )
        except OSError as error:
            raise TierFailed(
                f"cannot recover the store in {directory.path}, which is as it was: {error}",
                path=str(directory.path),
            ) from error
        # Before the disk tier may take what room there is.
        keep_room(recovered.writer, ballast)
        self._room.look()
        return recovered

    async def _serve(
        self,
        recovered: Recovered,
        ballast: Ballast,
        listening: socket.socket,
        metrics_port: int,
    ) -> None:
        config = self._reloader.config
        measured = Measured(self._metrics)
        parts = assemble(config, recovered, self._counters, hooks=measured, deaths=self)
        self._reader = StatusReader(
            config,
            self._lifecycle,
            recovered.writer,
            recovered.report,
            parts,
            self._started,
            self._room,
        )
        operations = Operations(parts, self._lifecycle, self._reload, config.server.operator_uids)
        sessions = Sessions(
            parts,
            self._lifecycle,
            lambda: to_plain(self._document()),
            observer=measured,
            slow=self._slow,
            operations=operations,
        )
        self._reader.sessions = sessions
        listener = Listener(
            listening,
            sessions,
            uids=_admitted(config),
            limits=_connection_limits(config),
        )

        def apply(config: Config) -> None:
            _set_up_log(config)
            self._slow.slow_s = config.log.slow_op_s
            listener.admit(_admitted(config), _connection_limits(config))
            operations.operator_uids = config.server.operator_uids
            parts.apply(config, recovered.writer)

        self._reloader.apply = apply
        housekeeping = Housekeeping(
            recovered.writer, ballast, parts.checkpointer, parts.planner.placement, self._room
        )
        # Nobody heard of it if the configuration was reloaded while the store was recovered.
        self._slow.slow_s = config.log.slow_op_s
        parts.begin(recovered.state.epoch, write_through=config.disk.write == "through")
        keep_objects()
        if self._attempts is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._attempts.served)
        self._lifecycle.enter(DaemonState.SERVING)
        self._announce(recovered, metrics_port)
        with watched_collector(self._metrics.gc_pause):
            await self._until_stopped(
                listener.serve(),
                parts.engine.write_behind(),
                parts.prefault.run(),
                parts.pinning.run(),
                housekeeping.run(lambda: self._reloader.config.wal, self._note_status),
                watch_loop(self._metrics.loop_turn, self._metrics.loop_delay),
                self._history.record(self._document),
                self._announcer.keep_telling(self._in_short),
                feed(self._notifier, period_s(os.environ), parts.pulses),
            )
        operations.stop()
        if self._lifecycle.state is not DaemonState.DRAINING:
            self._lifecycle.enter(DaemonState.DRAINING)
        log.info("stopping: what is only in RAM goes to disk")
        self._announcer.stopping()
        # Workers see end-of-file and come back to the next daemon: their leases stay in the log.
        parts.leases.close()
        await listener.close()
        await sessions.give_up()
        await self._while(
            write_what_is_in_ram(parts.engine, parts.checkpointer),
            self._announcer.keep_asking_for_time(
                lambda: f"stopping: {parts.engine.unwritten_blocks:,} blocks to be written to disk"
            ),
        )
        await self._note_status()
        await parts.close()
        recovered.close()

    async def _while(self, work: Awaitable[T], beside: Coroutine[Any, Any, None]) -> T:
        """The result of the work, with something else going on beside it until then."""
        going_on = asyncio.ensure_future(beside)
        try:
            return await work
        finally:
            going_on.cancel()

    async def _until_stopped(self, *work: Any) -> None:
        """Run the background work until a signal; its failure is the daemon's."""
        tasks = [asyncio.ensure_future(one) for one in work]
        stopping = asyncio.ensure_future(self._stop.wait())
        done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, *tasks):
            task.cancel()
        await asyncio.gather(stopping, *tasks, return_exceptions=True)
        for task in done - {stopping}:
            error = task.exception()
            if error is not None:
                raise error

    async def _note_status(self) -> None:
        try:
            await write_last_status(Path(self._config.server.state_dir), self._document())
        except OSError as error:
            log.warning("cannot write the last status: %s", error)

    # --- what ends it at once ---------------------------------------------------------------------

    def log_died(self, error: Exception) -> None:
        """See assembly.Deaths."""
        if not isinstance(error, OSError | WalError):
            self.broken(error)
        self._forgive_this_start()
        extra = {"lsn": self._reader.writer.written_lsn} if self._reader is not None else {}
        log.critical("the log cannot be written, stopping at once: %s", error, extra=extra)
        _flush_streams()
        os._exit(EXIT_IO)

    def broken(self, error: BaseException) -> None:
        """See assembly.Deaths."""
        if isinstance(error, GpuFailed):
            # What lies on the GPU is lost; all that was acknowledged is in the log, the host tier
            # and on disk, and only a new process gets a driver that works.
            self._forgive_this_start()
            log.critical("the GPU failed, stopping at once: %s", error, extra={"tier": "device"})
            _flush_streams()
            os._exit(EXIT_IO)
        log.critical("a request broke the daemon, stopping at once", exc_info=error)
        _flush_streams()
        os._exit(EXIT_FAILED)

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that nobody handled. One in our own code means that the state is in doubt."""
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self.broken(error)
        loop.default_exception_handler(context)

    def _document(self) -> StatusDocument:
        if self._reader is None:
            return StatusDocument(
                version=__version__,
                state=self._lifecycle.state.value,
                problems=self._problems.latest(),
                progress=self._progress.status(),
                pid=os.getpid(),
                uptime_s=time.monotonic() - self._started,
                durability=self._config.wal.durability,
                socket=self._config.server.socket,
            )
        self._read_counters(self._reader)
        document = self._reader.document()
        document.loop = self._loop_status()
        document.problems = self._problems.latest()
        document.config = self._reloader.status
        return document

    def _loop_status(self) -> LoopStatus:
        turns, delays = self._metrics.loop_turn, self._metrics.loop_delay
        pauses = self._metrics.gc_pause
        return LoopStatus(
            turns=turns.count,
            turn_p50_s=turns.quantile(0.5),
            turn_p99_s=turns.quantile(0.99),
            turn_p999_s=turns.quantile(0.999),
            turn_max_s=turns.largest,
            delay_p999_s=delays.quantile(0.999),
            delay_max_s=delays.largest,
            gc_runs=pauses.count,
            gc_max_s=pauses.largest,
        )

    def _read_counters(self, reader: StatusReader) -> None:
        """What the log, the checkpoints and the disk tier count themselves."""
        self._counters.wal_bytes = reader.writer.bytes_written
        self._counters.wal_frames = reader.writer.frames_written
        self._counters.checkpoint_timestamp_s = reader.parts.checkpointer.last_unix_s
        if reader.parts.disk is not None:
            self._counters.disk_read_errors = reader.parts.disk.read_errors

    def _in_short(self) -> str:
        return self._reader.in_short() if self._reader is not None else self._lifecycle.state.value

    def _announce(self, recovered: Recovered, metrics_port: int) -> None:
        report = recovered.report
        log.info(
            "serving",
            extra={
                "socket": self._config.server.socket,
                "metrics_port": metrics_port,
                "epoch": recovered.state.epoch,
                "blocks": report.blocks,
                "recovery_s": round(report.duration_s, 3),
                "records": report.records,
                "wal_end": report.wal_end,
                "index_rebuilt": bool(report.rebuilt),
                "leases_waiting": report.leases_kept,
                "device_bytes": self._config.device.bytes,
                "host_bytes": self._config.host.bytes,
                "disk_bytes": self._config.disk.bytes,
            },
        )
        self._announcer.serving(self._in_short())

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unexpected)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop)
        loop.add_signal_handler(signal.SIGHUP, self._told_to_reload)
        loop.add_signal_handler(signal.SIGUSR1, self._told_to_speak)

    def _told_to_reload(self) -> None:
        task = asyncio.get_running_loop().create_task(self._reload_unasked())
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)

    async def _reload_unasked(self) -> None:
        # What is wrong is in the log; there is nobody else to tell.
        with contextlib.suppress(ConfigError):
            await self._reload()

    async def _reload(self) -> Change:
        if self._reader is None:
            # The manager waits for the end of the start, and takes the end of a reload for it.
            return await self._reloader.run()
        with self._announcer.reloading(self._in_short):
            return await self._reloader.run()

    def _told_to_speak(self) -> None:
        log.info("asked how it is: %s", self._in_short(), extra=short_facts(self._document()))

    def _told_to_stop(self) -> None:
        if self._stop.is_set():
            # The second time: at once. What was acknowledged is in the log.
            _flush_streams()
            os._exit(EXIT_FAILED)
        self._stop.set()
        # Should it be killed before its start has ended, then because it was told to.
        self._forgive_this_start()

    def _forgive_this_start(self) -> None:
        """It ends before it serves, but not by what is on disk."""
        if self._attempts is not None and self._lifecycle.state is DaemonState.RECOVERING:
            self._attempts.forgive()


def _set_up_log(config: Config) -> None:
    log_setup(config.log.level, config.log.format)


def _admitted(config: Config) -> frozenset[int] | None:
    """Who may connect, if that is restricted: those who may operate the daemon, too."""
    server = config.server
    if not server.allowed_uids:
        return None
    return frozenset({*server.allowed_uids, *server.operator_uids, os.geteuid()})


def _slow(config: Config, leaving: contextlib.ExitStack) -> Slow:
    """Who hears of slow requests; ended on leaving. Raises ConfigError."""
    if not config.otel.endpoint:
        return Slow(config.log.slow_op_s)
    spans = Spans.sent_to(config.otel.endpoint, __version__)
    leaving.callback(spans.close)
    return Slow(config.log.slow_op_s, spans.add, config.otel.sample_every)


def _connection_limits(config: Config) -> ConnectionLimits:
    return ConnectionLimits(
        connections=config.server.connections_max,
        in_flight=config.server.in_flight_max,
        payload_bytes=config.server.message_bytes_max,
    )


def _gpu(config: Config) -> Gpu | None:
    """The GPU that is to have the device tier, if one is. Raises ConfigError."""
    device = config.device
    if device.kind == "cpu":
        return None
    try:
        gpu = Gpu.open(device.index)
    except KernelError as error:
        raise ConfigError(
            f'device.kind is "cuda", but GPU {device.index} cannot be used: {error}; write "cpu" '
            "to have the device tier in RAM, or, under systemd, install the drop-in devices.conf"
        ) from error
    log.info("the device tier is memory of a GPU", extra={"gpu": gpu.name, "index": gpu.index})
    return gpu


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
