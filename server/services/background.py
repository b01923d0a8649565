"""Writes that nobody waits for: a thread stores them, so that neither a read nor a full disk is in their way."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from server.db.engine import Database
from server.errors import Unavailable

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
BATCH = 500
RETRY_S = 5.0


class BackgroundWriter:
    """Takes writes from any thread and stores them in order, many in one transaction. Safe to use from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[Callable[[Any], None]] = deque()
        self._storing = threading.Lock()
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="background writer", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def put(self, write: Callable[[Any], None]) -> None:
        """Have `write(session)` carried out soon. While the database cannot be written, so many are kept, no more."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(write)
            self._bell.set()

    def flush(self) -> None:
        """Store what waits, now.

        Raises:
            Unavailable: the database cannot be written; it goes on waiting.
        """
        with self._storing:
            while self._waiting:
                batch = [self._waiting[place] for place in range(min(BATCH, len(self._waiting)))]
                with self._database.write() as session:
                    for write in batch:
                        write(session)
                for _ in batch:
                    self._waiting.popleft()

    def try_flush(self) -> None:
        """Store what waits, unless the database cannot be written."""
        self._flushed(said=True)

    def stop(self) -> None:
        """Store what waits, and end."""
        self._stopping.set()
        self._bell.set()
        self._thread.join()

    def _run(self) -> None:
        trouble = False
        while not self._stopping.is_set():
            self._bell.wait()
            self._bell.clear()
            trouble = not self._flushed(trouble)
            if trouble:
                self._stopping.wait(RETRY_S)
                self._bell.set()
        self._flushed(trouble)

    def _flushed(self, said: bool) -> bool:
        try:
            self.flush()
        except Unavailable as error:
            if not said:
                logger.error("audit log and use of tokens cannot be stored: %s; trying again", error.detail)
            return False
        return True
