"""Who may come in: the bearer token, one-time login codes, browser sessions. Only hashes of the latter are stored."""

import hashlib
import hmac
import os
import secrets
import threading
from datetime import datetime, timedelta
from pathlib import Path

from server.db.queries import sessions as session_queries
from server.errors import StartupError
from server.services.runtime import Runtime
from server.system import clock


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def read_or_make_token(path: Path) -> str:
    """The token in a file; made at first start, readable by its owner only."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        token = path.read_text(errors="replace").strip()
        if len(token) < 16 or not token.isascii():
            raise StartupError(f"{path} holds no token; delete it to have a new one made") from None
        path.chmod(0o600)
        return token
    token = secrets.token_urlsafe(32)
    with open(descriptor, "w") as file:  # noqa: PTH123 - a descriptor
        file.write(token + "\n")
        file.flush()
        os.fsync(file.fileno())
    return token


class Gate:
    """Judges tokens, codes and cookies."""

    def __init__(self, runtime: Runtime, token: str) -> None:
        self._runtime = runtime
        self._token_hash = _hash(token)
        self._lock = threading.Lock()
        self._codes: dict[str, datetime] = {}
        with runtime.database.write() as session:
            session_queries.delete_expired(session, clock.utc_now())
            self._sessions = session_queries.valid(session, clock.utc_now())

    def is_token(self, token: str) -> bool:
        """Whether this is the bearer token."""
        return hmac.compare_digest(_hash(token), self._token_hash)

    def is_session(self, cookie: str) -> bool:
        """Whether this cookie is of a session that has not expired."""
        end = self._sessions.get(_hash(cookie))
        return end is not None and clock.utc_now() < end

    def new_code(self) -> str:
        """A code for a login link: used once, within minutes."""
        code = secrets.token_urlsafe(24)
        now = clock.utc_now()
        with self._lock:
            self._codes = {known: end for known, end in self._codes.items() if end > now}
            self._codes[_hash(code)] = now + timedelta(minutes=self._runtime.settings.login_minutes)
        return code

    def redeem(self, code: str) -> str | None:
        """The cookie of a new session for a good code; None for one that is unknown, used or too old."""
        now = clock.utc_now()
        with self._lock:
            end = self._codes.pop(_hash(code), None)
        if end is None or now >= end:
            return None
        cookie = secrets.token_urlsafe(32)
        expires = now + timedelta(hours=self._runtime.settings.session_hours)
        with self._runtime.database.write() as session:
            session_queries.add(session, _hash(cookie), now, expires)
        with self._lock:
            self._sessions = {**self._sessions, _hash(cookie): expires}
        return cookie
