"""Errors of the daemon.

ServiceError                what a client is told, as problem+json
|- BadRequest         400   what is no HTTP
|- Unreadable         400   the body is no JSON, or no YAML
|- Unauthorized       401
|- TooManyFailures    429   an address that has failed to sign in too often
|- HeadTooLarge       431   a request line and headers that do not end
|- Forbidden          403   outside the roots, a foreign Host or Origin, a scope that does not reach
|- NotFound           404
|- MethodNotAllowed   405
|- Conflict           409
|  |- RequestInFlight 409 another request with the same Idempotency-Key is at work
|- RequestTimeout     408   a body that does not come
|- LengthRequired     411
|- TooLarge           413
|- NotJson            415
|- RangeNotSatisfiable 416
|- Invalid            422   with one entry per field
|- KeyReused          422   an Idempotency-Key that came with another body before
`- Unavailable        503   the database cannot be used at the moment
   |- InsufficientStorage 507   the disk is full, or what was asked for would not fit on it
   `- Stopping        503   the daemon is being stopped
StartupError                what the operator is told when the daemon cannot start
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

MAX_ERRORS = 50
"""Faults that are listed; a body can hold a hundred thousand."""


@dataclass(frozen=True)
class FieldError:
    """One fault of a request. `pointer` is a JSON pointer into the body."""

    pointer: str
    message: str
    suggestion: str | None = None


class ServiceError(Exception):
    """Base of what a client is told."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, detail: str, errors: Sequence[FieldError] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = tuple(errors)


class BadRequest(ServiceError):
    """What is no HTTP."""

    status = 400
    kind = "bad-request"
    title = "Bad Request"


class Unreadable(ServiceError):
    """The body is not what it was announced as."""

    status = 400
    kind = "not-json"
    title = "The body cannot be read"


class Unauthorized(ServiceError):
    """No token, no session, or a wrong one."""

    status = 401
    kind = "unauthorized"
    title = "Not signed in"
    headers = MappingProxyType({"WWW-Authenticate": 'Bearer realm="eyas"'})


class TooManyFailures(ServiceError):
    """Another wrong token or login link from an address that has sent too many; a right one is always accepted."""

    status = 429
    kind = "too-many-failures"
    title = "Too many failed attempts"
    headers = MappingProxyType({"Retry-After": "2"})


class HeadTooLarge(ServiceError):
    """The request line and headers are longer than accepted."""

    status = 431
    kind = "head-too-large"
    title = "Request line or headers too long"


class Forbidden(ServiceError):
    """Known, but not allowed."""

    status = 403
    kind = "forbidden"
    title = "Not allowed"


class NotFound(ServiceError):
    """There is no such thing."""

    status = 404
    kind = "not-found"
    title = "Not found"


class MethodNotAllowed(ServiceError):
    """The route knows other methods."""

    status = 405
    kind = "method-not-allowed"
    title = "Method not allowed"


class Conflict(ServiceError):
    """The request contradicts the present state."""

    status = 409
    kind = "conflict"
    title = "Conflict"


class RequestInFlight(Conflict):
    """Another request with the same Idempotency-Key is being carried out."""

    kind = "request-in-flight"
    title = "The same request is being carried out"
    headers: Mapping[str, str] = {"Retry-After": "1"}


class RequestTimeout(ServiceError):
    """The body did not come in time."""

    status = 408
    kind = "request-timeout"
    title = "The request did not come in time"


class LengthRequired(ServiceError):
    """The body does not say how long it is."""

    status = 411
    kind = "length-required"
    title = "Content-Length is missing"


class TooLarge(ServiceError):
    """The body is larger than accepted."""

    status = 413
    kind = "too-large"
    title = "Request too large"


class NotJson(ServiceError):
    """The body is not announced as JSON, or is compressed."""

    status = 415
    kind = "unsupported-media-type"
    title = "Content-Type must be application/json, or application/yaml for a pipeline"


class RangeNotSatisfiable(ServiceError):
    """The part of a file or log that was asked for lies behind its end."""

    status = 416
    kind = "range-not-satisfiable"
    title = "No such part of the file"

    def __init__(self, detail: str, size: int) -> None:
        super().__init__(detail)
        self.headers = {"Content-Range": f"bytes */{size}"}


class Invalid(ServiceError):
    """The request cannot be carried out as it is."""

    status = 422
    kind = "invalid-request"
    title = "Invalid request"

    @classmethod
    def of(cls, errors: Sequence[FieldError], count: int | None = None) -> "Invalid":
        """From its faults; the detail is the first one. `count`: how many there are, if not all are listed."""
        count = len(errors) if count is None else count
        more = f" (and {count - 1} more)" if count > 1 else ""
        return cls(f"{errors[0].pointer or 'body'}: {errors[0].message}{more}", errors)


class KeyReused(ServiceError):
    """An Idempotency-Key that came with another body before."""

    status = 422
    kind = "idempotency-key-reused"
    title = "Idempotency-Key was used for another request"


class Unavailable(ServiceError):
    """The database cannot be used at the moment: locked for too long, disk full, unreadable."""

    status = 503
    kind = "unavailable"
    title = "Temporarily unavailable"


class InsufficientStorage(Unavailable):
    """A disk is full, or what was asked for would not fit on it."""

    status = 507
    kind = "insufficient-storage"
    title = "Not enough room on a disk"


class Stopping(Unavailable):
    """The daemon is being stopped; whoever waited asks again."""

    headers = MappingProxyType({"Retry-After": "1"})


class StartupError(Exception):
    """The daemon cannot start; the message is for the terminal."""
