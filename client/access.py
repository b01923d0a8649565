"""What `eyas token list` and `eyas audit` print, and text that cannot steer a terminal."""

import re
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """A text with its control characters and changes of direction spelt out; a job may have put any into it."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def token_line(token: dict[str, Any]) -> str:
    """One token."""
    until = "" if token["expires_at"] is None else f"  until {token['expires_at']}"
    used = "never used" if token["last_used_at"] is None else f"last used {token['last_used_at']}"
    return f"{token['name']:<20}  {token['scope']:<6}  {token['state']:<7}  {used}{until}"


def audit_line(entry: dict[str, Any]) -> str:
    """One entry of the audit log."""
    who = "unknown" if entry["actor"] is None else f"{entry['actor']} ({entry['via']})"
    what = f"{entry['method']} {entry['route'] or 'no route'}" + (f" {entry['job_id']}" if entry["job_id"] else "")
    return f"{entry['time']}  {who:<20}  {entry['peer'] or '-':<15}  {entry['status']}  {what}"
