"""A log as a person would have seen it: no colours, and of a progress bar drawn over itself the last drawing.

raw    b"start\\n\\rEpoch 0:  10%\\rEpoch 0: 100%\\n\\x1b[32mdone\\x1b[0m\\n"
clean  b"start\\nEpoch 0: 100%\\ndone\\n"

The text is cut where nothing is torn, and it is told how many raw bytes were used up, so that the next piece is asked
for by a raw offset and nothing need be remembered in between. A line that is being drawn is shown as it stands; when
it is drawn anew later, that is a line of its own.

Source for the sequences: ECMA-48, sections 5.3, 5.4 and 5.6; OSC as xterm ends it, with BEL or ST.
"""

import re
from collections.abc import Callable

MAX_SEQUENCE = 4096
"""Bytes of the longest control string (a title, a link); a longer one is text."""

_STRING = rb"[^\x07\x1b\n]{0,%d}" % MAX_SEQUENCE
_SEQUENCE = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, movements, modes
    rb"|\x1b[\]PX^_]" + _STRING + rb"(?:\x07|\x1b\\)"  # OSC, DCS, SOS, PM, APC: titles, links
    rb"|\x1b[ -/]*[0-Z\\`-~]"  # two and three bytes: character sets, keypad, index
)
_CONTROLS = bytes({*range(0x20), 0x7F} - set(b"\b\t\n\r"))
_C1 = dict.fromkeys(range(0x80, 0xA0))
"""The same control functions as one character each."""

_DRAWN = re.compile(rb"^[^\n\r\b]*[\r\b][^\n]*", re.MULTILINE)
"""A line that was drawn over itself."""

_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_]" + _STRING + rb"\x1b?|[ -/]*)\Z")
_CHARACTER = re.compile(rb"(?:[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z")


def whole_characters(data: bytes) -> int:
    """How many of these bytes end with a whole character, as UTF-8 goes; bytes that are no text count as whole."""
    torn = _CHARACTER.search(data, max(0, len(data) - 3))
    return len(data) if torn is None else torn.start()


def clean(data: bytes, before: bytes = b"", last: bool = True, at_end: bool = True) -> tuple[bytes, int]:
    """The text a person would have seen, and how many bytes of `data` it stands for.

    Args:
        data: raw bytes of a log.
        before: some of those that stand before them; enough to know whether their line has shown anything yet.
        last: nothing will ever follow.
        at_end: nothing follows as yet; else as many whole lines are taken as there are.
    """
    used = _cut(data, last, at_end)
    first, newline, rest = _without_controls(data[: _before_unfinished(data, used)]).partition(b"\n")
    shown = _line(_without_controls(before[before.rfind(b"\n") + 1 :])) != b""
    begun = _continued(first, overwritten=before.endswith(b"\r")) if shown else _line(first)
    text = (begun + newline + _replaced(_DRAWN, rest, _line)).decode(errors="replace")
    return (text if text.isascii() else text.translate(_C1)).encode(), used


def _without_controls(data: bytes) -> bytes:
    """Without sequences and control characters."""
    return _replaced(_SEQUENCE, data, lambda _sequence: b"").translate(None, _CONTROLS)


def _replaced(pattern: re.Pattern[bytes], data: bytes, by: Callable[[bytes], bytes]) -> bytes:
    """As `pattern.sub`, which takes a hundred bytes for each match."""
    kept, place = bytearray(), 0
    for found in pattern.finditer(data):
        kept += data[place : found.start()] + by(found[0])
        place = found.end()
    return bytes(kept + data[place:]) if place else data


def _cut(data: bytes, last: bool, at_end: bool) -> int:
    """Where nothing is torn: behind a line, a drawing of a bar, or at least a character and a sequence."""
    if at_end and last:
        return len(data)
    if not at_end:
        for end in (b"\n", b"\r"):
            if end in data:
                return data.rfind(end) + 1
    used = whole_characters(data)
    # All of it is one unfinished sequence, and there is more: then it is none.
    return _before_unfinished(data, used) or (0 if at_end else used)


def _before_unfinished(data: bytes, end: int) -> int:
    """Where the sequence begins that is not finished by `end`; `end` itself where there is none."""
    torn = _UNFINISHED.search(data, max(0, end - MAX_SEQUENCE), end)
    return end if torn is None else torn.start()


def _line(raw: bytes) -> bytes:
    """What is left of a line that was drawn over itself."""
    end = len(raw)
    while end >= 0:
        begin = raw.rfind(b"\r", 0, end)
        if text := _rubbed_out(raw[begin + 1 : end]):
            return text
        end = begin
    return b""


def _continued(raw: bytes, overwritten: bool) -> bytes:
    """The rest of a line whose beginning was shown already; what is drawn over that is a line of its own."""
    if b"\r" not in raw and not overwritten:
        return _rubbed_out(raw)
    first, _, rest = (b"", b"", raw) if overwritten else raw.partition(b"\r")
    anew = _line(rest)
    return b"\n" + anew if anew else _rubbed_out(first)


def _rubbed_out(text: bytes) -> bytes:
    """Each backspace takes the character before it."""
    if b"\b" not in text:
        return text
    kept = bytearray()
    for byte in text:
        if byte != 8:
            kept.append(byte)
            continue
        while kept and kept[-1] & 0xC0 == 0x80:
            kept.pop()
        if kept:
            kept.pop()
    return bytes(kept)
