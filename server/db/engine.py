"""The database: one SQLite file, many readers, one writer at a time.

Every write transaction begins with BEGIN IMMEDIATE: one that reads first and writes later is refused by SQLite at
once, whatever its timeout, or loses an update.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from server.errors import InsufficientStorage, Unavailable

_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=NORMAL",
    "foreign_keys=ON",
    "busy_timeout=15000",
    "journal_size_limit=67108864",
    "temp_store=MEMORY",
    "trusted_schema=OFF",
)
_WRITE = "eyas_write"

_FULL = frozenset({"SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"})
_MAYBE_FULL = _FULL | {"SQLITE_IOERR_WRITE"}
"""What SQLite says where a user's quota is exceeded, and of a disk that is broken as well."""


class Database:
    """Sessions of one database file."""

    def __init__(self, path: Path, make_room: Callable[[bool], None] = lambda _failed: None) -> None:
        """Open.

        Args:
            path: the file.
            make_room: called before each write, and with True when one has failed.
        """
        self._make_room = make_room
        self.engine = create_engine(f"sqlite:///{path}", pool_size=8, max_overflow=32)
        event.listen(self.engine, "connect", _on_connect)
        event.listen(self.engine, "begin", _on_begin)
        self._writer = self.engine.execution_options(**{_WRITE: True})

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view; nothing is written.

        Raises:
            Unavailable: the database cannot be read.
        """
        with translated(), Session(self.engine, autoflush=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A write transaction, committed at the end and rolled back by an exception.

        Raises:
            Unavailable: the database is locked by someone else or damaged; InsufficientStorage: its disk is full.
        """
        self._make_room(False)
        try:
            with translated(), Session(self._writer, autoflush=False) as session, session.begin():
                yield session
        except Unavailable as error:
            if _name(error.__cause__) in _MAYBE_FULL:
                self._make_room(True)
            raise

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()


@contextmanager
def translated() -> Iterator[None]:
    """Errors of the database as one that clients and operators are told."""
    try:
        yield
    except DBAPIError as error:
        if _name(error) in _FULL:
            raise InsufficientStorage(f"database: {error.orig}; free space on its disk") from error
        raise Unavailable(f"database: {error.orig}") from error


def _name(error: BaseException | None) -> str | None:
    """SQLite's own name for an error."""
    origin = error.orig if isinstance(error, DBAPIError) else None
    return origin.sqlite_errorname if isinstance(origin, sqlite3.Error) else None


def _on_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions are begun below, not by the driver's guess
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    immediate = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
