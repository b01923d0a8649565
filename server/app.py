"""The daemon: puts the parts together, listens, and goes quietly.

serve(settings) -> state directory locked -> database migrated -> loop -> HTTP until SIGTERM
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from errno import EADDRINUSE
from ipaddress import ip_address
from typing import Any

import uvicorn
from fastapi import FastAPI

from eagle3_core.contract.jobdir import read_json, write_json
from server.api import (
    admin,
    daemon,
    hardware,
    jobs,
    logs,
    outcomes,
    pages,
    pipelines,
    problems,
    streams,
    waiting,
)
from server.api.access import AccessControl
from server.api.context import AppContext
from server.api.openapi import DescribedApp
from server.db.engine import Database
from server.db.migrate import upgrade
from server.domain.redaction import MIN_VALUE, Redactor
from server.errors import StartupError, Unavailable
from server.services.auth import Gate, read_or_make_token
from server.services.rebuild import refuse_lost_database
from server.services.reconciler import Reconciler
from server.services.removal import finish_removals
from server.services.runtime import Runtime
from server.services.waiters import Waiters
from server.settings import Settings, missing_paths, secret_values, unknown_variables, unprotected_variables
from server.system import locks
from server.system.connections import guarded_protocol, max_connections
from server.system.descriptors import raise_limit
from server.system.disk import Reserve
from server.system.logs import set_up_logging
from server.system.memory import share_arenas

logger = logging.getLogger(__name__)

ROUTERS = (
    jobs.router,
    logs.router,
    streams.router,
    outcomes.router,
    pipelines.router,
    hardware.router,
    daemon.router,
    pages.router,
    admin.router,
)

READY: frozenset[Any] = frozenset(
    {
        jobs.get_job,
        logs.get_log,
        streams.stream_events,
        streams.stream_log,
        outcomes.get_artifact,
        admin.post_token,
    }
)
"""Endpoints whose answers need no redaction: jobs are kept ready without secrets, logs and events are read so,
artifacts are what the work needs, byte for byte, and the secret of a new token is meant to be told."""


Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def routed(lifespan: Lifespan | None = None) -> DescribedApp:
    """The routes alone, which are all its description follows from."""
    app = DescribedApp(
        title="Eyas", version=pages.VERSION, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    for router in ROUTERS:
        app.include_router(router)
    return app


def build_app(runtime: Runtime, gate: Gate, on_death: Callable[[], None], port: int) -> FastAPI:
    """The application over an open runtime; its lifespan starts and stops the loop."""
    loop = Reconciler(runtime, on_death)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        runtime.background.start()
        runtime.hardware.start()
        runtime.waiters.open()
        runtime.growth.open()
        try:
            loop.start()
            yield
            loop.stop()
        finally:
            runtime.growth.close()
            runtime.hardware.stop()
            runtime.background.stop()

    app = routed(lifespan)
    # Cookies do not know ports: two daemons on one host must not overwrite each other's.
    cookie_name = f"eyas_session_{port}"
    app.state.context = AppContext(runtime, gate, loop, cookie_name)
    routes = [route for router in ROUTERS for route in router.routes]
    problems.install(app, routes)
    waiting.install(app)
    hosts = frozenset(name.lower() for name in (runtime.settings.host, *runtime.settings.allowed_hosts))
    app.add_middleware(
        AccessControl,
        runtime=runtime,
        gate=gate,
        cookie_name=cookie_name,
        hosts=hosts,
        routes=routes,
        ready=READY,
    )
    return app


def serve(settings: Settings) -> None:
    """Run the daemon until it is told to stop. Running jobs stay when it goes.

    Raises:
        StartupError: another daemon has the state directory, the address is taken, the database is newer or
            damaged, or the state directory cannot be written.
    """
    set_up_logging(Redactor(secret_values(settings.secret_variables)))
    share_arenas()
    try:
        lock = _own(settings)
        listener = _listen(settings.host, settings.port)
        settings.database.touch(mode=0o600)
        reserve = Reserve(settings.reserve_file, settings.disk_reserve_mb << 20)
        reserve.make_room()
        database = Database(settings.database, reserve.make_room)
        try:
            upgrade(database.engine)
            settings.jobs_dir.mkdir(exist_ok=True)
            finish_removals(settings, database)
            refuse_lost_database(settings, database)
            _run(settings, database, listener)
        finally:
            database.close()
            listener.close()
            settings.address_file.unlink(missing_ok=True)
            locks.release(lock)
    except OSError as error:
        raise StartupError(f"{settings.state} cannot be used: {error}") from error
    except Unavailable as error:
        raise StartupError(f"{settings.database} cannot be used: {error.detail}") from error


def _own(settings: Settings) -> int:
    """The lock on the state directory, which is made when it is not there."""
    settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = locks.take(settings.state / "daemon.lock")
    if lock is None:
        try:
            known = read_json(settings.address_file)
            where = f" at {known['url']} (pid {known['pid']})" if known else ""
        except (ValueError, KeyError, TypeError):
            where = ""
        raise StartupError(f"{settings.state} is in use by another daemon{where}; stop it or name another --state")
    return lock


def _run(settings: Settings, database: Database, listener: socket.socket) -> None:
    token = read_or_make_token(settings.token_file)
    redactor = Redactor([token, *secret_values(settings.secret_variables)])
    set_up_logging(redactor)
    runtime = Runtime(settings, database, redactor)
    gate = Gate(runtime, token)
    port = listener.getsockname()[1]
    url = f"http://{_in_url(settings.host)}:{port}"

    died = threading.Event()

    def on_death() -> None:
        logger.critical("the loop that watches the jobs has died; stopping. Running jobs go on")
        died.set()
        server.should_exit = True

    room = max_connections(raise_limit())
    app = build_app(runtime, gate, on_death, port)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=guarded_protocol(room, settings.unread_s, settings.silent_s),
        backlog=128,  # also how many connections are taken before any of them is closed again
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # whoever reaches the port could say that it is somebody else
        ws="none",
        timeout_graceful_shutdown=2,
    )
    server = Server(config, runtime.waiters)
    write_json(settings.address_file, {"url": url, "pid": os.getpid()}, mode=0o600)
    _announce(settings, url, gate)
    # uvicorn raises the signal again once it has stopped; by then everything is done.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    server.run(sockets=[listener])
    if died.is_set():
        raise SystemExit(1)


TURNS_TO_CONNECT = 10
"""Of the loop, once no more is accepted. A connection takes three until it is among those that are told to go; one that
is not would hold up the stop, and get a bare 500 at its end.
"""


class Server(uvicorn.Server):
    """Answers those who wait before it goes; else each of them would hold it up until the time for that is over."""

    def __init__(self, config: uvicorn.Config, waiters: Waiters) -> None:
        super().__init__(config)
        self._waiters = waiters

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Go."""
        self._waiters.close()
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener)
        for _ in range(TURNS_TO_CONNECT):
            await asyncio.sleep(0)
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on connections; else each answer waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections get it from here: a client that waits and was unplugged is found out within two minutes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3)):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        other = "; --port N names another one, 0 a free one" if error.errno == EADDRINUSE else ""
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror}{other}") from None
    listener.listen(512)
    return listener


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether only this host can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _announce(settings: Settings, url: str, gate: Gate) -> None:
    roots = "\n           ".join(str(root) for root in settings.all_roots)
    lines = [
        f"Eyas {pages.VERSION} listens on {url}",
        f"  page     {url}/login?code={gate.new_code()}  (once, within {settings.login_minutes:g} minutes)",
        f"  state    {settings.state}",
        f"  token    {settings.token_file}",
        f"  roots    {roots}",
    ]
    if not is_loopback(settings.host):
        lines.append(f"warning: {settings.host} can be reached from other hosts, and the connection is not encrypted")
    warnings = (
        missing_paths(settings) + unknown_variables() + unprotected_variables(settings.secret_variables, MIN_VALUE)
    )
    lines += [f"warning: {text}" for text in warnings]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
