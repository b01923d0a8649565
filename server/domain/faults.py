"""What a validation found, as faults of fields: where, what, and what was meant."""

import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from server.domain.references import escape
from server.domain.words import nearest
from server.errors import FieldError

_QUOTED = re.compile(r"'([^']*)'")


def fault_of(found: Mapping[str, Any], loc: Sequence[int | str], model: type[BaseModel] | None, of: str) -> FieldError:
    """One entry of pydantic's errors as a fault.

    Args:
        found: the entry.
        loc: where, from the model on.
        model: that was to be met; None where it is not known.
        of: what an unknown field is said not to be a field of, with its preposition; may be empty.
    """
    pointer = "".join(f"/{escape(part)}" for part in loc)
    text, given = str(found["msg"]).removeprefix("Value error, "), found.get("input")
    if found["type"] == "extra_forbidden":
        name = str(loc[-1])
        near = nearest(name, _fields_at(model, loc[:-1]))
        return FieldError(pointer, f"{name} is not a field{of}" + (f"; did you mean {near}?" if near else ""), near)
    if found["type"] in ("literal_error", "enum") and isinstance(given, str):
        near = nearest(given, _QUOTED.findall(str(found["ctx"]["expected"])))
        return FieldError(pointer, text + (f"; did you mean {near}?" if near else ""), near)
    if found["type"] == "missing" and loc:
        return FieldError(pointer, f"{loc[-1]} is required")
    return FieldError(pointer, text)


def _fields_at(model: type[BaseModel] | None, loc: Sequence[int | str]) -> list[str]:
    """The fields of the model that lies at a place inside another one; none where there is no model."""
    kind: Any = model
    for part in loc:
        kind = _inner(kind, part)
    kind = _plain(kind)
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def _inner(kind: Any, part: int | str) -> Any:
    kind = _plain(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(part))
        return None if field is None else field.annotation
    arguments = get_args(kind)
    if get_origin(kind) is dict:
        return arguments[1]
    return arguments[0] if get_origin(kind) in (list, tuple) else None


def _plain(kind: Any) -> Any:
    """A type without its annotations, and the one besides None in a union of the two."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    members = [one for one in get_args(kind) if one is not NoneType]
    return _plain(members[0]) if len(members) == 1 and NoneType in get_args(kind) else kind
