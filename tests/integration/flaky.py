"""A link that loses every third thing the daemon sends, and the connection with it."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator


class FlakyLink:
    """Listens on a port of its own and passes everything on to another, save every third piece that comes back.

    A piece is an answer, or of a long one so much as was ready. The request behind a lost answer has been carried out.
    """

    def __init__(self, port: int, every: int = 3) -> None:
        self._target = port
        self._every = every
        self._pieces = itertools.count(1)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lost = 0
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        # Closing alone leaves a thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, lossy: bool) -> None:
        with contextlib.suppress(OSError):
            for piece in iter(lambda: source.recv(65_536), b""):
                if lossy and next(self._pieces) % self._every == 0:
                    self.lost += 1
                    break
                target.sendall(piece)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if lossy:
            source.close()
            target.close()


@contextlib.contextmanager
def flaky_link(url: str) -> Iterator[FlakyLink]:
    link = FlakyLink(int(url.rpartition(":")[2]))
    try:
        yield link
    finally:
        link.close()
