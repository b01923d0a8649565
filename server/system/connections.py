"""Connections of clients: not more than the process has descriptors for, none that says nothing for ever, none that
does not end its request, and none that takes nothing of what it is sent.
"""

import json
from asyncio import TimerHandle, Transport
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import BadRequest, HeadTooLarge, RequestTimeout, ServiceError

KEPT_FREE = 600
"""Descriptors for the database, logs that are read, and workers."""

MOST = 8192
HEAD_BYTES = 64 << 10
"""Request line and headers; the parser itself would keep any length of them."""


def max_connections(descriptors: int) -> int:
    """How many connections so many descriptors are enough for."""
    return max(64, min(MOST, descriptors - KEPT_FREE))


class GuardedProtocol(HttpToolsProtocol):
    """HTTP on one connection, which is closed when there are too many, when no request came in time or not all of its
    body, or when the client has left what it was sent unread for too long: what waits to be sent takes memory, and an
    open connection.
    """

    most = max_connections(1024)
    unread_s = 60.0
    silent_s = 30.0
    _unread: TimerHandle | None = None
    _unsent: TimerHandle | None = None
    _head_bytes = 0
    _in_body = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Take the connection or close it."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self.loop.call_later(self.silent_s, self._close_if_silent)

    def data_received(self, data: bytes) -> None:
        """Go on reading the request; a head that does not end is refused."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_body and self._unsent is None:
            self._unsent = self.loop.call_later(self.silent_s, self._refuse_slow_body)
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HeadTooLarge(f"request line and headers are longer than {HEAD_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        """The head has been read."""
        self._head_bytes = 0
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body has been read."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has been read."""
        self._in_body = False
        self._unset_unsent()
        super().on_message_complete()

    def shutdown(self) -> None:
        """Go as soon as the answer is sent; a request that is not there yet gets none."""
        if self._in_body:
            self.transport.close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """The client takes less than it is sent: its time begins."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken most of it."""
        self._unset_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._unset_unread()
        self._unset_unsent()
        super().connection_lost(exc)

    def _unset_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _unset_unsent(self) -> None:
        if self._unsent is not None:
            self._unsent.cancel()
            self._unsent = None

    def _refuse_slow_body(self) -> None:
        if self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.disconnected = True  # whatever the application has to say of it
            self._refuse(RequestTimeout(f"the body did not come within {self.silent_s:g} s"))

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(BadRequest(msg))

    def _refuse(self, error: ServiceError) -> None:
        """Answer what never reaches the application as the application would."""
        problem = {
            "type": f"urn:eyas:problem:{error.kind}",
            "title": error.title,
            "status": error.status,
            "detail": error.detail,
            "instance": "",
            "request_id": None,
            "errors": [],
        }
        body = json.dumps(problem).encode()
        status = HTTPStatus(error.status)
        head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/problem+json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Whoever offers another protocol is answered in this one, and that is nothing to warn of."""

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


def guarded_protocol(most: int, unread_s: float, silent_s: float) -> type[GuardedProtocol]:
    """The protocol with these limits."""
    limits = {"most": most, "unread_s": unread_s, "silent_s": silent_s}
    return type("LimitedProtocol", (GuardedProtocol,), limits)
