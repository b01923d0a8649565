"""Connections of clients: not more than the process has descriptors for, and none that says nothing for ever."""

import json
from asyncio import Transport

from uvicorn.protocols.http.h11_impl import H11Protocol

from server.errors import BadRequest

MAX_CONNECTIONS = 400
"""Of the usual 1024 descriptors; the rest is for the database, logs and workers."""

SILENT_S = 30.0


class GuardedProtocol(H11Protocol):
    """HTTP on one connection, which is closed when there are too many, or when no request came in time."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Take the connection or close it."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self.loop.call_later(SILENT_S, self._close_if_silent)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and never reaches the application, as the application would."""
        problem = {
            "type": f"urn:eyas:problem:{BadRequest.kind}",
            "title": BadRequest.title,
            "status": BadRequest.status,
            "detail": msg,
            "instance": "",
            "request_id": None,
            "errors": [],
        }
        body = json.dumps(problem).encode()
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/problem+json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()
