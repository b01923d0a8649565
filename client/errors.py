"""What a client is told when a request did not succeed.

ApiError      the daemon refused
Unreachable   no daemon answers, or the connection broke
"""

from typing import Any, cast


class ApiError(Exception):
    """The daemon refused; `problem` is its RFC 9457 answer."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        detail = problem.get("detail") or problem.get("title") or f"HTTP {status}"
        super().__init__(str(detail))
        self.status = status
        self.problem = problem

    @property
    def fields(self) -> list[dict[str, Any]]:
        """The faulty fields: pointer, message, suggestion."""
        return cast("list[dict[str, Any]]", self.problem.get("errors", []))


class Unreachable(Exception):
    """No daemon answers."""
