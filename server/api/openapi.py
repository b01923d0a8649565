"""The OpenAPI document: what the framework makes of the routes, with every problem and with examples.

Problems follow from the error tree, by their status, so that a route names only the statuses it may answer.
"""

import json
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from server.api import examples
from server.api.access import OPEN_PATHS, YAML, needed_scope
from server.api.problems import MEDIA_TYPE, REQUEST_ID, TYPE_PREFIX, Problem
from server.errors import KeyReused, RequestInFlight, ServiceError
from server.services.requests import PipelineRequest

REFERENCE = "#/components/schemas/{model}"
EVERYWHERE = (400, 401, 403, 429, 431, 500, 503)
WITH_BODY = (408, 411, 413, 415)
ONLY_WITH_KEY = (KeyReused, RequestInFlight)


class DescribedApp(FastAPI):
    """An application that describes itself so."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            self.openapi_schema = document(self)
        return self.openapi_schema


def document(app: FastAPI) -> dict[str, Any]:
    """The document, made anew."""
    made = get_openapi(
        title=app.title,
        version=app.version,
        description="Trains EAGLE-3 drafters as watched jobs. Everything but /healthz needs a bearer token.",
        routes=app.routes,
    )
    schemas = made["components"]["schemas"]
    for model in (Problem, PipelineRequest):
        schema = model.model_json_schema(ref_template=REFERENCE)
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    made["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    made["components"]["responses"] = _problem_responses()
    made["security"] = [{"token": []}]
    for path, method, operation in _operations(made):
        if operation["operationId"] == "submitPipeline":
            schema = _reference("PipelineRequest")
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema}, YAML: {"schema": schema}},
            }
        _describe(path, method, operation)
    return made


def text_of(app: FastAPI) -> str:
    """The document as it is committed: the same bytes for the same routes."""
    return json.dumps(document(app), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _operations(made: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _describe(path: str, method: str, operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    refused = {int(status) for status in answers if status >= "400"} | set(EVERYWHERE)
    if "requestBody" in operation:
        refused |= set(WITH_BODY)
    if path in OPEN_PATHS:
        operation["security"] = []
        refused -= {401, 429}
    else:
        operation["description"] += f"\n\nScope: {needed_scope(method.upper(), path)}."
    keyed = any(one["name"] == "idempotency-key" for one in operation.get("parameters", ()))
    for status in refused:
        # A probe is answered what it asks about also when the answer is no.
        model = answers.get(str(status), {}).get("content", {}).get("application/json", {}).get("schema", {})
        named = model.get("$ref", "").rpartition("/")[2]
        if named in ("", "Problem", "HTTPValidationError"):
            answers[str(status)] = {"$ref": f"#/components/responses/{_response_name(status, keyed)}"}
        else:
            answers[str(status)]["content"][MEDIA_TYPE] = {"schema": _reference("Problem")}
    operation["responses"] = dict(sorted(answers.items()))
    for answer in operation["responses"].values():
        if "$ref" not in answer:
            answer.setdefault("headers", {})[REQUEST_ID] = {"schema": {"type": "string"}}
    examples.add(operation)


def _reference(model: str) -> dict[str, str]:
    return {"$ref": REFERENCE.replace("{model}", model)}


def _response_name(status: int, keyed: bool) -> str:
    only_with_key = any(kind.status == status for kind in ONLY_WITH_KEY)
    return f"Problem{status}" + ("WithKey" if keyed and only_with_key else "")


def _problem_responses() -> dict[str, Any]:
    """One response for each status, and for each that an Idempotency-Key adds to."""
    found: dict[str, Any] = {}
    for keyed in (False, True):
        for kind in sorted(_kinds(ServiceError), key=lambda kind: (kind.status, kind.kind)):
            if kind in ONLY_WITH_KEY and not keyed:
                continue
            response = found.setdefault(
                _response_name(kind.status, keyed),
                {
                    "headers": {REQUEST_ID: {"schema": {"type": "string"}}},
                    "content": {MEDIA_TYPE: {"schema": _reference("Problem"), "examples": {}}},
                },
            )
            response["content"][MEDIA_TYPE]["examples"][kind.kind] = {"value": _example(kind)}
    for response in found.values():
        shown = response["content"][MEDIA_TYPE]["examples"].values()
        response["description"] = "; or: ".join(dict.fromkeys(one["value"]["title"] for one in shown))
    return found


def _kinds(root: type[ServiceError]) -> Iterator[type[ServiceError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)


def _example(kind: type[ServiceError]) -> dict[str, Any]:
    return {
        "type": TYPE_PREFIX + kind.kind,
        "title": kind.title,
        "status": kind.status,
        "detail": "what is wrong, and what to do",
        "instance": "/jobs/k7m2p9qxwz",
        "request_id": "5f0c9a1be2d34c77",
        "errors": [],
    }
