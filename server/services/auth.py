"""Who may come in: bearer tokens, one-time login codes, browser sessions. Only hashes are stored.

A token holds 256 random bits, so SHA-256 of it is as good as the slow hashes that passwords need: there is nothing to
guess, and each request can afford it.
"""

import hashlib
import hmac
import os
import secrets
import threading
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Literal

from server.db.queries import sessions as session_queries
from server.db.queries import tokens as token_queries
from server.domain.callers import OWNER, RESERVED, Caller, Scope, Token
from server.domain.failures import FailureLimit
from server.errors import Conflict, NotFound, StartupError
from server.services.runtime import Runtime
from server.system import clock

TOKEN_PREFIX = "eyas_"  # noqa: S105 - what every secret begins with, so that scanners know it
OWNER_KEY_DIGITS = 40
"""Of the hash of the owner's token, by which the sessions it began are known: another token in the file ends them."""

USED_EVERY = timedelta(minutes=1)

_OWNER = Caller(OWNER, Scope.ADMIN)


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
    """Judges tokens, codes and cookies, from memory; gives tokens out and takes them back."""

    def __init__(self, runtime: Runtime, owner_token: str) -> None:
        self._runtime = runtime
        self._owner_hash = _hash(owner_token)
        self._owner_key = f"{OWNER}/{self._owner_hash[:OWNER_KEY_DIGITS]}"  # no name of a token holds a slash
        self._lock = threading.Lock()
        self._codes: dict[str, tuple[datetime, str]] = {}
        self._noted: dict[str, datetime] = {}
        self._failures = FailureLimit()
        with runtime.database.write() as session:
            session_queries.delete_expired(session, clock.utc_now())
            self._sessions = session_queries.valid(session, clock.utc_now())
        self._load()

    def _load(self) -> None:
        with self._runtime.database.read() as session:
            tokens = token_queries.all_tokens(session)
        self._by_hash = {token.key_hash: token for token in tokens}
        self._by_name = {token.name: token for token in tokens}

    def caller_of_token(self, secret: str) -> Caller | None:
        """Whose token this is. Hashes are compared, of which nobody can choose the first digits."""
        digest = _hash(secret)
        if hmac.compare_digest(digest, self._owner_hash):
            return _OWNER
        token, now = self._by_hash.get(digest), clock.utc_now()
        if token is None or not token.is_good(now):
            return None
        last = self._noted.get(token.name)
        if last is None or now - last >= USED_EVERY:
            self._noted[token.name] = now
            self._runtime.background.put(partial(token_queries.used, name=token.name, now=now))
        return Caller(token.name, token.scope)

    def caller_of_cookie(self, cookie: str) -> Caller | None:
        """Whose session this is, as long as neither it nor the token it came from has ended."""
        end, name = self._sessions.get(_hash(cookie), (None, None))
        now = clock.utc_now()
        if end is None or now >= end:
            return None
        if name == self._owner_key:
            return replace(_OWNER, via="session")
        token = None if name is None else self._by_name.get(name)
        return Caller(token.name, token.scope, "session") if token and token.is_good(now) else None

    def may_fail(self, peer: str | None) -> bool:
        """Count a failed attempt of an address; False when there were too many."""
        with self._lock:
            return self._failures.take(peer, clock.boottime())

    def new_code(self, caller: Caller = _OWNER) -> str:
        """A code for a login link with the scope of this caller: used once, within minutes."""
        code = secrets.token_urlsafe(24)
        now = clock.utc_now()
        name = self._owner_key if caller.name == OWNER else caller.name
        with self._lock:
            self._codes = {known: value for known, value in self._codes.items() if value[0] > now}
            self._codes[_hash(code)] = (now + timedelta(minutes=self._runtime.settings.login_minutes), name)
        return code

    def redeem(self, code: str) -> str | None:
        """The cookie of a new session for a good code; None for one that is unknown, used or too old."""
        now = clock.utc_now()
        with self._lock:
            end, name = self._codes.pop(_hash(code), (None, None))
        if end is None or name is None or now >= end:
            return None
        cookie = secrets.token_urlsafe(32)
        expires = now + timedelta(hours=self._runtime.settings.session_hours)
        with self._runtime.database.write() as session:
            session_queries.add(session, _hash(cookie), name, now, expires)
        with self._lock:
            self._sessions = {**self._sessions, _hash(cookie): (expires, name)}
        return cookie

    def create_token(self, name: str, scope: Scope, days: float | None) -> tuple[Token, str]:
        """A new token and its secret, which is told this once.

        Raises:
            Conflict: the name is taken, also by one that was revoked.
        """
        secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
        now = clock.utc_now()
        token = Token(name, _hash(secret), scope, now, None if days is None else now + timedelta(days=days))
        with self._lock:
            if name in RESERVED or name in self._by_name:
                raise Conflict(f"there is or was a token {name!r}; names are not used again, for the audit log's sake")
            with self._runtime.database.write() as session:
                token_queries.add(session, token)
            self._load()
        return token, secret

    def tokens(self) -> list[Token]:
        """Every token but the owner's, oldest first."""
        self._runtime.background.try_flush()
        with self._runtime.database.read() as session:
            return token_queries.all_tokens(session)

    def state_of(self, token: Token) -> Literal["active", "expired", "revoked"]:
        """Whether a token is accepted, and why not."""
        if token.revoked_at is not None:
            return "revoked"
        return "active" if token.is_good(clock.utc_now()) else "expired"

    def revoke(self, name: str) -> Token:
        """Accept a token, and the sessions it began, no more.

        Raises:
            NotFound: there is none of that name.
        """
        with self._lock:
            if name not in self._by_name:
                raise NotFound("there is no token of that name; the owner's is made anew by deleting its file")
            with self._runtime.database.write() as session:
                token_queries.revoke(session, name, clock.utc_now())
            self._load()
            return self._by_name[name]
