"""Errors as RFC 9457 problem+json; the one place that makes them."""

import logging
import uuid
from collections.abc import Callable, Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from server.domain.policy import RetryPolicy
from server.domain.redaction import Redactor
from server.domain.resources import Resources
from server.errors import MAX_ERRORS, FieldError, Invalid, NotFound, ServiceError
from server.services.submission import ChainRequest, JobRequest, nearest

logger = logging.getLogger(__name__)

Redact = Callable[[str], str]
"""Gives a text back without its secrets."""

TYPE_PREFIX = "urn:eyas:problem:"
MEDIA_TYPE = "application/problem+json"
MAX_TEXT = 2000
"""Characters of a message; what was sent may be a megabyte, and is not sent back."""


_MODELS: dict[str, type[BaseModel]] = {"chain": ChainRequest, "resources": Resources, "retry": RetryPolicy}


class ProblemField(BaseModel):
    """One faulty field."""

    pointer: str = Field(description="JSON pointer into the body, or ?name for a query parameter")
    message: str
    suggestion: str | None = None


class Problem(BaseModel):
    """RFC 9457, with one entry per faulty field."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[ProblemField] = []


def problem_response(error: ServiceError, path: str, redact: Redact) -> JSONResponse:
    """A service error as an answer; what was sent is shown without secrets, then cut."""
    response = _answer(error.status, error.kind, error.title, error.detail, path, redact, error.errors)
    response.headers.update(error.headers)
    return response


def _answer(
    status: int, kind: str, title: str, detail: str, path: str, redact: Redact, errors: Sequence[FieldError] = ()
) -> JSONResponse:
    def shown(text: str) -> str:
        return redact(text)[:MAX_TEXT]

    problem = Problem(
        type=TYPE_PREFIX + kind,
        title=title,
        status=status,
        detail=shown(detail),
        instance=shown(path),
        errors=[
            ProblemField(pointer=shown(e.pointer), message=shown(e.message), suggestion=e.suggestion) for e in errors
        ],
    )
    return JSONResponse(problem.model_dump(), status_code=status, media_type=MEDIA_TYPE)


def _redact(request: Request) -> Redact:
    redactor: Redactor = request.app.state.context.runtime.redactor
    return redactor.text


def install(app: FastAPI) -> None:
    """Have every error of the app answered as a problem."""
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(RequestValidationError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return problem_response(error, request.url.path, _redact(request))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: no such route, no such method, a body that cannot be parsed."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    if status == HTTPStatus.NOT_FOUND:
        return problem_response(NotFound(f"there is no {request.url.path}"), request.url.path, _redact(request))
    # The only 400 the framework raises itself: a body no parser reads, such as one nested thousands deep.
    kind = "not-json" if status == HTTPStatus.BAD_REQUEST else status.phrase.lower().replace(" ", "-")
    response = _answer(status, kind, status.phrase, str(error.detail), request.url.path, _redact(request))
    response.headers.update(error.headers or {})
    return response


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    if any(fault["type"] == "json_invalid" for fault in faults):
        fault = str(faults[0]["ctx"]["error"])
        return _answer(400, "not-json", "The body is not JSON", fault, request.url.path, _redact(request))
    shown = [_field_error(fault) for fault in faults[:MAX_ERRORS]]
    return problem_response(Invalid.of(shown, len(faults)), request.url.path, _redact(request))


def _field_error(fault: dict[str, object]) -> FieldError:
    loc = fault["loc"]
    assert isinstance(loc, tuple)
    parts = [str(part) for part in loc[1:]]
    if loc[0] != "body":
        return FieldError(f"?{'/'.join(parts)}", str(fault["msg"]))
    if parts and parts[0] in ("job", "chain"):
        parts = parts[1:]
    pointer = "".join(f"/{part}" for part in parts)
    message = str(fault["msg"])
    if fault["type"] != "extra_forbidden":
        return FieldError(pointer, message)
    name = parts[-1]
    parent = parts[-2] if len(parts) > 1 else ("chain" if loc[1] == "chain" else "")
    near = nearest(name, _MODELS.get(parent, JobRequest).model_fields)
    return FieldError(pointer, f"{name} is not a field" + (f"; did you mean {near}?" if near else ""), near)


async def _on_bug(request: Request, error: Exception) -> Response:
    number = uuid.uuid4().hex[:12]
    logger.error("error %s while answering %s", number, request.url.path, exc_info=error)
    detail = f"see error {number} in the daemon's log"
    return _answer(500, "internal", "Internal error", detail, request.url.path, _redact(request))
