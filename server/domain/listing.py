"""What a list of jobs is narrowed by, and where its next page begins."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from server.domain.states import JobState

_PREFIX = "before:"


@dataclass(frozen=True)
class JobFilter:
    """Which jobs are meant; of several values of one kind any will do, different kinds must all hold.

    Attributes:
        states, stages, names: any of them; empty for all.
        labels: key -> values, one of which the label must have; no value at all means any.
        since: those submitted then or later.
        pipeline: id of the pipeline they were submitted with.
    """

    states: tuple[JobState, ...] = ()
    stages: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    since: datetime | None = None
    pipeline: str | None = None


ALL_JOBS = JobFilter()


def cursor_before(number: int) -> str:
    """Where the page behind the job of this number begins. Jobs that come in meanwhile do not move it."""
    return base64.urlsafe_b64encode(f"{_PREFIX}{number}".encode()).decode().rstrip("=")


def number_of_cursor(cursor: str) -> int:
    """The number in a cursor of ours.

    Raises:
        ValueError: it is none.
    """
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, UnicodeError) as error:
        raise ValueError("not a cursor") from error
    digits = text.removeprefix(_PREFIX)
    if not text.startswith(_PREFIX) or not digits.isdecimal() or len(digits) > 18:
        raise ValueError("not a cursor")
    return int(digits)
