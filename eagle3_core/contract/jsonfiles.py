"""JSON files written by others: bounded, strict, and with errors that name the file. Standard library only."""

import json
from pathlib import Path
from typing import Any, NoReturn

from eagle3_core.errors import BadInput

LFS_POINTER = b"version https://git-lfs"
"""What a file begins with that git has left in place of a large one."""

MAX_JSON_BYTES = 64_000_000
"""Configs are a few kB and the largest published weight index about 20 MB."""


def repeated_key(pairs: list[tuple[str, Any]]) -> str | None:
    """The first key of a JSON object that stands in it a second time."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return None


def not_there(path: Path) -> str:
    """What to say of a path where nothing is: caches hold links, whose files may be gone or never came."""
    return "leads to a file that is not there; fetch it again" if path.is_symlink() else "no such file"


def read_json_object(path: Path) -> dict[str, Any]:
    """The object a JSON file holds.

    Raises:
        BadInput: no such file, not a regular file, too large, not UTF-8, not JSON, a key twice, or not an object.
    """
    raw = _content(path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if (key := repeated_key(pairs)) is not None:
            raise BadInput(f"{path}: holds the key {key!r} twice")
        return dict(pairs)

    def refuse(constant: str) -> NoReturn:
        raise BadInput(f"{path}: holds {constant}, which is not JSON")

    try:
        data = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique, parse_constant=refuse)
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not valid JSON: {error}" if raw.strip() else f"{path}: empty file") from error
    if not isinstance(data, dict):
        raise BadInput(f"{path}: holds {type(data).__name__}, not a JSON object")
    return data


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise BadInput(f"{path}: {'is not a regular file' if path.exists() else not_there(path)}")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_JSON_BYTES:
        raise BadInput(f"{path}: over {MAX_JSON_BYTES:,} bytes, too large for a config")
    if raw.startswith(LFS_POINTER):
        raise BadInput(f"{path}: is a Git LFS pointer, not the file; run `git lfs pull`")
    return raw
