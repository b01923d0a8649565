"""Who calls, and what they may do.

read     look: every GET
submit   and act on jobs: submit, cancel, pause, resume, checkpoint
admin    and act on the daemon: tokens, audit log, `external` jobs
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal


class Scope(StrEnum):
    """What a token allows; each includes the ones before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def covers(self, needed: "Scope") -> bool:
        """Whether a caller with this scope may do what needs the other."""
        return _ORDER.index(self) >= _ORDER.index(needed)


_ORDER = list(Scope)

OWNER = "owner"
"""Name of the token in the state directory."""

LOCAL = "local"
"""Who puts a command file into a job directory."""

RESERVED = frozenset({OWNER, LOCAL})
"""Names no token may have."""


@dataclass(frozen=True)
class Caller:
    """A known caller.

    Attributes:
        name: of the token.
        via: `token`; `session`, which a login link of that token began; `local`, a command file in a job directory.
    """

    name: str
    scope: Scope
    via: Literal["token", "session", "local"] = "token"


@dataclass(frozen=True)
class Token:
    """A named token, without its secret."""

    name: str
    key_hash: str
    scope: Scope
    created_at: datetime
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None

    def is_good(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True)
class AuditEntry:
    """A write or a refused attempt.

    Attributes:
        actor: name of the token; None for a caller that is not known.
        via: of the caller; None with `actor`.
        route: as the API describes it, never as it was sent: that may hold anything.
        status: of the answer.
    """

    time: datetime
    actor: str | None
    via: str | None
    peer: str | None
    method: str
    route: str | None
    job_id: str | None
    status: int
