"""Whole copies of a database in use, and its condition.

By SQLite's own means: a copy of the file alone would lack what is still in the -wal.
"""

import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from eagle3_core.contract.jobdir import fsync_directory
from server.errors import Unavailable

FAULTS_SHOWN = 20


def copy_database(source: Path, target: Path) -> None:
    """Copy a database, whoever uses it meanwhile; the copy appears complete or not at all, mode 0600.

    Raises:
        Unavailable: the source is no database, damaged or locked, or there is no room for the copy.
        OSError: the target cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    partial.touch(mode=0o600)
    try:
        with _told(source), closing(_read_only(source)) as original, closing(sqlite3.connect(partial)) as copy:
            original.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, nothing beside it
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)


def become_another(copy: Path) -> None:
    """Have a copy known as another database: put back, it counts on from versions that clients know with other content.

    One of before databases had names is left as it is; the next start gives it one.
    """
    with _told(copy), closing(sqlite3.connect(copy)) as database:
        if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'incarnation'").fetchone():
            database.execute("UPDATE incarnation SET id = ?", (secrets.token_hex(4),))
            database.commit()


def faults_of(path: Path) -> list[str]:
    """What SQLite finds wrong with a database: nothing, if it is sound.

    Raises:
        Unavailable: it is no database at all, or locked.
    """
    with _told(path), closing(_read_only(path)) as database:
        broken = [row[0] for row in database.execute(f"PRAGMA quick_check({FAULTS_SHOWN})") if row[0] != "ok"]
        orphans = [
            f"row {rowid} of {table} refers to a row that {parent} lacks"
            for table, rowid, parent, _ in database.execute("PRAGMA foreign_key_check").fetchmany(FAULTS_SHOWN)
        ]
    return broken + orphans


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise Unavailable(f"{path}: {error}") from error


def _read_only(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=15)
    connection.execute("PRAGMA query_only=ON")
    return connection
