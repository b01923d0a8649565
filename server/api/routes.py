"""Routes that refuse what they do not know: a misspelt parameter must not be taken for one that was left out, nor the
last of several values for the only one, in the query or in the body.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query as QueryParam
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from server.api.context import app_context
from server.domain.words import nearest
from server.errors import FieldError, Invalid
from server.services.documents import read_json


class _Request(Request):
    """A request whose body is read by our own rules."""

    async def json(self) -> Any:
        """The JSON value of the body."""
        return read_json(await self.body())


class KnownQuery(APIRoute):
    """A route that answers 422 to a query parameter it does not know, or takes one value of and was given several."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the check."""
        handle = super().get_route_handler()
        fields = [field for field in get_flat_params(self.dependant) if isinstance(field.field_info, QueryParam)]
        known = sorted(field.alias for field in fields)
        lists = {field.alias for field in fields if _is_list(field.field_info.annotation)}

        async def checked(request: Request) -> Response:
            if request.scope["query_string"]:
                wrong = [_error(name, known) for name in request.query_params if name not in known]
                names = [name for name, _ in request.query_params.multi_items()]
                twice = sorted({name for name in known if name not in lists and names.count(name) > 1})
                wrong += [
                    FieldError(f"?{name}", f"{name} is given more than once and takes one value") for name in twice
                ]
                if wrong:
                    raise Invalid.of(wrong)
            return await handle(_Request(request.scope, request.receive))

        return checked


class Direct(KnownQuery):
    """A route of an endpoint of context, request and what the path names, which is called by itself where no query was
    sent: there is nothing to check then, and working that out anew is a third of the time a look at a job takes.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, or the endpoint itself."""
        handle = super().get_route_handler()

        async def direct(request: Request) -> Response:
            if request.scope["query_string"]:
                return await handle(request)
            answer: Response = await self.endpoint(await app_context(request), request, **request.path_params)
            return answer

        return direct


def _is_list(annotation: Any) -> bool:
    schema = TypeAdapter[Any](annotation).json_schema()
    return any(one.get("type") == "array" for one in schema.get("anyOf", [schema]))


def _error(name: str, known: list[str]) -> FieldError:
    near = nearest(name, known)
    there_are = f"there are {', '.join(known)}" if known else "this route takes none"
    hint = f"did you mean {near}?" if near else there_are
    return FieldError(f"?{name}", f"{name} is not a parameter; {hint}", near)
