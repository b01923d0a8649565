"""Text from files and jobs that cannot steer a terminal, and that every encoding can write. Standard library only."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, changes of direction, and halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""


def plain(text: str) -> str:
    """A text with its control characters and changes of direction spelt out; a file may have put any into it."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
