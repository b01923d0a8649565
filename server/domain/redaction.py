"""What must not be shown is overwritten, in every text that leaves the daemon.

by value   values of secret environment variables and the daemon's own token, wherever they stand, also as JSON, in a
           URL, or in lower case
by shape   what is a token by its looks (`hf_...`, `ghp_...`, `eyas_...`), what follows `Bearer`, names and passwords in
           URLs
by key     what follows `password`, `api_key`, `access_token` and the like

The length stays the same, so that offsets into a log hold and a body fits its Content-Length; and JSON stays JSON.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import quote

MIN_VALUE = 8
"""Characters; a shorter value is as likely a common word."""

MIN_LINE = 16
"""Characters of one line of a value of several, such as a private key."""

MAX_SHAPE = 1024
"""Bytes of the longest secret that is known by its looks alone."""

_NUMBER = re.compile(rb"[0-9.eE+-]+")

# Each pattern stands with a fixed text it begins with or holds, which is searched first and much faster; what stands
# before a key is looked at last.
_SHAPES = (
    (b"hf_", re.compile(rb"hf_(?<![A-Za-z0-9]hf_)([A-Za-z0-9]{16,512})")),
    (b"eyas_", re.compile(rb"eyas_(?<![A-Za-z0-9]eyas_)([A-Za-z0-9_-]{32,512})")),
    (b"sk-", re.compile(rb"sk-(?<![A-Za-z0-9]sk-)([A-Za-z0-9_-]{20,512})")),
    (b"gh", re.compile(rb"gh[oprsu]_(?<![A-Za-z0-9]gh._)([A-Za-z0-9]{20,512})")),
    (b"github_pat_", re.compile(rb"github_pat_([A-Za-z0-9_]{20,512})")),
    (b"glpat-", re.compile(rb"glpat-([A-Za-z0-9_-]{20,512})")),
    (b"AKIA", re.compile(rb"AKIA(?<![A-Za-z0-9]AKIA)([0-9A-Z]{16})")),
    (b"xox", re.compile(rb"xox[a-z]-([A-Za-z0-9-]{10,512})")),
    (b"earer ", re.compile(rb"earer ([A-Za-z0-9._~+/=-]{16,1000})")),
    (b"://", re.compile(rb"://([^\s/?#@\"'<>\\]{1,512})@")),
)

_VALUE = (
    rb'(?:"\s{0,8}:\s{0,8}"((?:[^"\\]|\\.)+)"'  # JSON
    rb"|\\?[\"']?\s{0,8}[:=]\s{0,8}\\?[\"']([^\"'\\]{4,1000})"  # quoted, perhaps within JSON
    rb"|\s{0,8}[:=]\s{0,8}([^\s\"'\\,;&<>`]{6,1000})"
    rb"|(?:\s{1,8}|\\?[\"'],\s{0,8}\\?[\"'])([^\s\"'\\,-][^\s\"'\\,]{5,1000}))"  # the next argument of a command
)
_KEYS = tuple(
    (stem, re.compile(stem + rest + _VALUE))
    for stem, rest in (
        (b"token", b""),
        (b"secret", b""),
        (b"key", b"(?:_id)?"),
        (b"passw", b"(?:or)?d"),
        (b"passphrase", b""),
        (b"credential", b"s?"),
        (b"sig", b"(?:nature)?"),
    )
)
_BEFORE = re.compile(
    rb"[?&][\w.-]{0,64}$"  # in a query any of them will do
    rb"|(?:hf|hub|access|auth|api|bearer|refresh|session|wandb|github|gitlab|huggingface|secret|private)[_-]?$"
)
_OPTION = re.compile(rb"--(?:[\w-]{0,32}[_-])?$")
_ALONE = frozenset({b"secret", b"password", b"passwd", b"passphrase", b"credential", b"credentials"})
"""Keys that say enough by themselves; a `token` or `key` may be anything in the logs of a training."""

_WORD = re.compile(rb"[a-z]+")
_ARGUMENT = 4
"""Number of the group of `_VALUE` that is the next argument."""


class Redactor:
    """Overwrites what is secret. `values`: the secrets that are known."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        literals = {form for value in values for form in _forms(value)}
        self._literals = sorted(((text, _mask(text)) for text in literals), key=lambda pair: -len(pair[0]))
        self.margin = max([MAX_SHAPE, *(len(text) for text in literals)])
        """Bytes on both sides that must be seen to find a secret a piece of text begins or ends in."""

    def text(self, value: str) -> str:
        """A text without its secrets."""
        return self.data(value.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")

    def data(self, value: bytes) -> bytes:
        """UTF-8 text, JSON or a log without its secrets, as long as it was."""
        for literal, mask in self._literals:
            if literal in value:
                value = value.replace(literal, mask)
        spans = list(_spans(value))
        if not spans:
            return value
        shown = bytearray(value)
        for start, end in spans:
            shown[start:end] = b"*" * (end - start)
        return bytes(shown)


def _spans(value: bytes) -> Iterator[tuple[int, int]]:
    """Where in a text there are secrets by their shape or key."""
    for hint, shape in _SHAPES:
        if hint in value:
            for found in shape.finditer(value):
                yield found.span(1)
    lower = value.lower()
    for stem, pattern in _KEYS:
        for found in pattern.finditer(lower) if stem in lower else ():
            which = found.lastindex
            assert which is not None
            key = found[0][: found.start(which) - found.start()]
            before = lower[max(0, found.start() - 80) : found.start()]
            if _says_secret(key, before, is_argument=which == _ARGUMENT):
                yield found.span(which)


def _says_secret(key: bytes, before: bytes, is_argument: bool) -> bool:
    """Whether a key, what stands before it, and the kind of its value make the value a secret."""
    if is_argument:
        return _OPTION.search(before) is not None
    word = _WORD.match(key)
    return (word is not None and word[0] in _ALONE) or _BEFORE.search(before) is not None


def _mask(literal: bytes) -> bytes:
    """As long as the literal, and a number where that is one: it may stand in JSON without quotes."""
    return (b"1" if _NUMBER.fullmatch(literal) else b"*") * len(literal)


def _forms(value: str) -> Iterable[bytes]:
    """The ways a value may be written down."""
    writings: tuple[Callable[[str], str], ...] = (
        str,
        str.lower,
        lambda text: json.dumps(text)[1:-1],
        lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
        lambda text: quote(text, safe=""),
        lambda text: quote(text),
        lambda text: repr(text)[1:-1],
    )
    value = value.strip()
    lines = [line.strip() for line in value.splitlines()] if len(value.splitlines()) > 1 else []
    parts = [value] if len(value) >= MIN_VALUE else []
    for part in parts + [line for line in lines if len(line) >= MIN_LINE]:
        for written in writings:
            yield written(part).encode("utf-8", "surrogatepass")
