"""Which word was meant."""

import difflib
from collections.abc import Collection


def nearest(word: str, known: Collection[str]) -> str | None:
    """The known word a misspelt one most resembles, or None."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
