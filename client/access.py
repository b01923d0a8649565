"""What `eyas token list` and `eyas audit` print."""

from typing import Any


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
