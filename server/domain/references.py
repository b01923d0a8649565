"""References between the stages of a pipeline: `${prepare.output_dir}` inside the texts of another one's parameters.

`$${` stands for `${` itself. Pure.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
_WELL_FORMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,62})\.([a-z_]+)")

FIELDS = ("output_dir", "id")
"""What can be asked of a stage before it has run."""


class BadReference(Exception):
    """A reference that stands for nothing. `pointer` is relative to the value it was found in."""

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(message)
        self.pointer = pointer
        self.message = message


def escape(part: object) -> str:
    """A key as a part of a JSON pointer (RFC 6901)."""
    return str(part).replace("~", "~0").replace("/", "~1")


def texts_of(value: Any, pointer: str = "") -> Iterator[tuple[str, str]]:
    """Pointer and text of every string in a JSON value; keys are not looked at."""
    if isinstance(value, str):
        yield pointer, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from texts_of(one, f"{pointer}/{escape(key)}")
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from texts_of(one, f"{pointer}/{place}")


def references_in(value: Any) -> list[tuple[str, str]]:
    """Where each reference in a value stands, and the stage it names, in order.

    Raises:
        BadReference: one is not of the form ${stage.field}, or its field is unknown.
    """
    return [
        (pointer, _parsed(pointer, match)[0])
        for pointer, text in texts_of(value)
        for match in _REFERENCE.finditer(text)
        if match[1] is not None
    ]


def filled_in(value: Any, look_up: Callable[[str, str], str]) -> Any:
    """The value with each reference, which `references_in` has looked at, replaced by `look_up(stage, field)`."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: "${" if match[1] is None else look_up(*_parsed("", match)), value)
    if isinstance(value, dict):
        return {key: filled_in(one, look_up) for key, one in value.items()}
    if isinstance(value, list):
        return [filled_in(one, look_up) for one in value]
    return value


def _parsed(pointer: str, match: re.Match[str]) -> tuple[str, str]:
    found = _WELL_FORMED.fullmatch(match[1])
    if found is None or not match[0].endswith("}"):
        raise BadReference(pointer, f"{match[0]!r} is no reference; write ${{stage.output_dir}}, or $${{ for the text")
    if found[2] not in FIELDS:
        raise BadReference(pointer, f"{match[0]!r}: what can be referred to is {' and '.join(FIELDS)}")
    return found[1], found[2]
