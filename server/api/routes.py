"""Routes that refuse what they do not know: a misspelt parameter must not be taken for one that was left out."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query as QueryParam
from fastapi.routing import APIRoute

from server.domain.words import nearest
from server.errors import FieldError, Invalid


class KnownQuery(APIRoute):
    """A route that answers 422 to a query parameter it does not know."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the check."""
        handle = super().get_route_handler()
        known = sorted(
            field.alias for field in get_flat_params(self.dependant) if isinstance(field.field_info, QueryParam)
        )

        async def checked(request: Request) -> Response:
            if request.scope["query_string"]:
                unknown = [name for name in request.query_params if name not in known]
                if unknown:
                    raise Invalid.of([_error(name, known) for name in unknown])
            return await handle(request)

        return checked


def _error(name: str, known: list[str]) -> FieldError:
    near = nearest(name, known)
    there_are = f"there are {', '.join(known)}" if known else "this route takes none"
    hint = f"did you mean {near}?" if near else there_are
    return FieldError(f"?{name}", f"{name} is not a parameter; {hint}", near)
