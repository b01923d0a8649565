"""The Range header for one part of a file. Source: RFC 9110, section 14."""

import re
from dataclasses import dataclass

_ONE = re.compile(r"bytes=\s*([0-9]{0,99})-([0-9]{0,99})\s*")


@dataclass(frozen=True)
class Span:
    """`length` bytes from `start`."""

    start: int
    length: int


class Unsatisfiable(Exception):
    """The part lies behind the end."""


def span_of(header: str | None, size: int) -> Span | None:
    """The part that is asked for, or None for the whole: no header, several parts, or one that makes no sense.

    Args:
        header: its value.
        size: of the file, in bytes.

    Raises:
        Unsatisfiable: it begins behind the last byte.
    """
    found = None if header is None else _ONE.fullmatch(header)
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        length = min(int(last), size)
        if length == 0:
            raise Unsatisfiable
        return Span(size - length, length)
    start = int(first)
    if last and int(last) < start:
        return None
    if start >= size:
        raise Unsatisfiable
    end = min(int(last), size - 1) if last else size - 1
    return Span(start, end - start + 1)
