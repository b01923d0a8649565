"""Errors as RFC 9457 problem+json; the one place that makes them."""

import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route

from server.domain.faults import fault_of
from server.domain.redaction import Redactor
from server.errors import MAX_ERRORS, FieldError, Invalid, MethodNotAllowed, NotFound, ServiceError, Unreadable
from server.services.requests import ChainRequest, JobRequest

logger = logging.getLogger(__name__)

Redact = Callable[[str], str]
"""Gives a text back without its secrets."""

TYPE_PREFIX = "urn:eyas:problem:"
MEDIA_TYPE = "application/problem+json"
REQUEST_ID = "X-Request-ID"
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
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
    request_id: str | None = Field(description="as in X-Request-ID, and in the daemon's log; null for what is no HTTP")
    errors: list[ProblemField] = []


def request_id_of(headers: Headers, redact: Redact) -> str:
    """What a request is called in its answer and in the log: as the client says, where that is a plain word and no
    secret.
    """
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) and redact(given) == given else f"{random.getrandbits(64):016x}"


def problem_response(error: ServiceError, path: str, request_id: str, redact: Redact) -> JSONResponse:
    """A service error as an answer; what was sent is shown without secrets, then cut."""

    def shown(text: str) -> str:
        return redact(text)[:MAX_TEXT]

    problem = Problem(
        type=TYPE_PREFIX + error.kind,
        title=error.title,
        status=error.status,
        detail=shown(error.detail),
        instance=shown(path),
        request_id=request_id,
        errors=[
            ProblemField(pointer=shown(e.pointer), message=shown(e.message), suggestion=e.suggestion)
            for e in error.errors
        ],
    )
    headers = {REQUEST_ID: request_id, **error.headers}
    return JSONResponse(problem.model_dump(), error.status, headers, media_type=MEDIA_TYPE)


def _respond(request: Request, error: ServiceError) -> JSONResponse:
    redactor: Redactor = request.app.state.context.runtime.redactor
    request_id: str = request.state.request_id
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("request %s: %s %s: %s", request_id, request.method, request.url.path, error.detail)
    return problem_response(error, request.url.path, request_id, redactor.text)


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Have every error of the app answered as a problem; `routes` are all it has."""
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(RequestValidationError, _on_request_error)
    app.add_exception_handler(HTTPException, partial(_on_http_error, routes))
    app.add_exception_handler(Exception, _on_bug)


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return _respond(request, error)


async def _on_http_error(routes: Sequence[BaseRoute], request: Request, error: Exception) -> Response:
    """What the framework refuses: no such route, no such method, a body that cannot be parsed."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return _respond(request, NotFound(f"there is no {request.url.path}"))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_methods_of(routes, request))
        refused = MethodNotAllowed(f"{request.url.path} does not know {request.method}; it knows {allowed}")
        response = _respond(request, refused)
        response.headers["Allow"] = allowed
        return response
    # The only other one the framework raises itself: the body could not be read, for the reason it was raised from.
    unread = error.__cause__ if isinstance(error.__cause__, ServiceError) else Unreadable(str(error.detail))
    return _respond(request, unread)


def _methods_of(routes: Sequence[BaseRoute], request: Request) -> list[str]:
    """What can be done with the path: each method is a route of its own."""
    there = [one for one in routes if isinstance(one, Route) and one.matches(request.scope)[0] != Match.NONE]
    return sorted(set().union(*(route.methods or () for route in there)))


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    shown = [_field_error(request, fault) for fault in faults[:MAX_ERRORS]]
    return _respond(request, Invalid.of(shown, len(faults)))


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
    route = request.scope.get("route")
    field = route.body_field if isinstance(route, APIRoute) else None
    members = () if field is None else (field.field_info.annotation, *get_args(field.field_info.annotation))
    return next((one for one in members if isinstance(one, type) and issubclass(one, BaseModel)), None)


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("request %s: %s %s", request.state.request_id, request.method, request.url.path, exc_info=error)
    detail = f"a bug; the daemon's log says more under {request.state.request_id}"
    redactor: Redactor = request.app.state.context.runtime.redactor
    return problem_response(ServiceError(detail), request.url.path, request.state.request_id, redactor.text)
