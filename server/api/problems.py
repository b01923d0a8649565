"""Errors as RFC 9457 problem+json; the one place that makes them."""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from server.domain.faults import fault_of
from server.domain.redaction import Redactor
from server.errors import MAX_ERRORS, FieldError, Invalid, NotFound, ServiceError
from server.services.requests import ChainRequest, JobRequest

logger = logging.getLogger(__name__)

Redact = Callable[[str], str]
"""Gives a text back without its secrets."""

TYPE_PREFIX = "urn:eyas:problem:"
MEDIA_TYPE = "application/problem+json"
MAX_TEXT = 2000
"""Characters of a message; what was sent may be a megabyte, and is not sent back."""


_TAGGED: dict[str, type[BaseModel]] = {"job": JobRequest, "chain": ChainRequest}
"""What the place of a fault begins with where a body may be one of two things."""


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
    shown = [_field_error(request, fault) for fault in faults[:MAX_ERRORS]]
    return problem_response(Invalid.of(shown, len(faults)), request.url.path, _redact(request))


def _field_error(request: Request, fault: Mapping[str, Any]) -> FieldError:
    where, *loc = fault["loc"]
    if where != "body":
        name = "/".join(str(part) for part in loc)
        return replace(fault_of(fault, loc, None, ""), pointer=f"?{name}" if where == "query" else f"{where}:{name}")
    if loc and loc[0] in _TAGGED:
        return fault_of(fault, loc[1:], _TAGGED[str(loc[0])], "")
    return fault_of(fault, loc, _body_model(request), "")


def _body_model(request: Request) -> type[BaseModel] | None:
    """What the body of a route has to be, besides absent."""
    field = getattr(request.scope.get("route"), "body_field", None)
    members = () if field is None else (field.field_info.annotation, *get_args(field.field_info.annotation))
    return next((one for one in members if isinstance(one, type) and issubclass(one, BaseModel)), None)


async def _on_bug(request: Request, error: Exception) -> Response:
    number = uuid.uuid4().hex[:12]
    logger.error("error %s while answering %s", number, request.url.path, exc_info=error)
    detail = f"see error {number} in the daemon's log"
    return _answer(500, "internal", "Internal error", detail, request.url.path, _redact(request))
