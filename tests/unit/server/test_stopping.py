"""Connections that come in while the daemon goes."""

import asyncio
import socket

import pytest
import uvicorn

from server.app import Server
from server.services.waiters import Waiters
from server.system.connections import guarded_protocol

BEGUN = b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"


async def wait_for_more(scope, receive, send):
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize("turns", range(6))
def test_a_request_that_has_begun_holds_up_no_stop_however_far_its_connection_has_come(turns, caplog):
    """Each turn of the loop takes it a step further: accepted, made, read, handed to the application."""

    async def stop():
        listener = socket.create_server(("127.0.0.1", 0))
        http = guarded_protocol(8, 60.0, 60.0)
        config = uvicorn.Config(wait_for_more, http=http, lifespan="off", log_config=None, timeout_graceful_shutdown=2)
        config.load()
        server = Server(config, Waiters())
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(BEGUN)
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.shutdown(sockets=[listener])
            client.settimeout(10)
            try:
                return await asyncio.to_thread(client.recv, 4096)
            except ConnectionResetError:
                return b""  # it was never read

    assert asyncio.run(stop()) == b""
    assert "timeout graceful shutdown exceeded" not in caplog.text
