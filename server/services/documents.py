"""Bodies: JSON, and YAML documents as JSON values, of which the safe subset is read as YAML 1.2 reads it.

YAML 1.1, which the library follows by itself, takes the key `on` for true and 1e-4 for a text.
"""

import json
import re
from typing import Any

import yaml

from eagle3_core.contract.jsonfiles import repeated_key
from server.errors import Unreadable

_TAG = "tag:yaml.org,2002:"
_TAGS = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map"))

MAX_BYTES = 256 << 10
"""Of a document; reading takes about a second a megabyte."""


def read_json(data: bytes) -> Any:
    """The JSON value of a body. NaN and infinities are read, to be refused where they stand.

    Raises:
        Unreadable: it is none, is not UTF-8, or has a key twice, of which only the last would count.
    """
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_each_key_once)
    except UnicodeDecodeError as error:
        raise Unreadable(f"the body is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"not JSON: {error}") from None
    except ValueError:
        raise Unreadable("a number of the body has more digits than can be read") from None
    except RecursionError:
        raise Unreadable("the body is nested too deeply") from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (key := repeated_key(pairs)) is not None:
        raise Unreadable(f"the key {key[:100]!r} comes twice")
    return dict(pairs)


class _Loader(yaml.CSafeLoader):
    """Scalars of the YAML 1.2 core schema; no anchors, no merging, no key twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - the library's own name


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor(_TAG + "int", lambda _loader, node: int(node.value))  # 010 is ten


def read_yaml(data: bytes) -> Any:
    """The JSON value a YAML document stands for.

    Raises:
        Unreadable: it is none, is too large, or uses what JSON has no word for; names the line.
    """
    if len(data) > MAX_BYTES:
        raise Unreadable(f"a YAML document has at most {MAX_BYTES} bytes; JSON may be larger")
    try:
        loader = _Loader(data.decode("utf-8"))
        try:
            node = loader.get_single_node()
            _check(node, set())
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except UnicodeDecodeError as error:
        raise Unreadable(f"the YAML document is not UTF-8 (byte {error.start})") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        raise Unreadable(f"not YAML: {error.problem}{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unreadable(f"not YAML: {error}") from None


def _check(node: yaml.Node | None, seen: set[int]) -> None:
    """Refuse aliases, which could stand for more than memory holds, keys that are no text or come twice, and tags."""
    if node is None:
        return
    line = node.start_mark.line + 1
    if id(node) in seen:
        raise Unreadable(f"not taken: an alias (line {line}); use `defaults` for what stages have in common")
    seen.add(id(node))
    if node.tag not in _TAGS:
        raise Unreadable(f"not JSON: the tag {node.tag.rpartition(':')[2]} (line {line})")
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            if key.tag != _TAG + "str":
                raise Unreadable(f"not JSON: the key {key.value!r} is no text (line {key.start_mark.line + 1})")
            if key.value in keys:
                raise Unreadable(f"not JSON: the key {key.value!r} comes twice (line {key.start_mark.line + 1})")
            keys.add(key.value)
            _check(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for one in node.value:
            _check(one, seen)
