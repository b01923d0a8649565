"""Job ids: short, safe in a URL and as a directory name, and checked before any path is made of one."""

import re
import secrets

_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ALPHABET = "23456789abcdefghjkmnpqrstvwxyz"


def new_job_id() -> str:
    """Ten letters and digits that are not easily mistaken for one another; about 49 random bits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


def is_job_id(text: str) -> bool:
    """Whether the text may be a job id at all."""
    return _PATTERN.fullmatch(text) is not None
