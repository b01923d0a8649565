"""Rendered conversations -> token ids and loss mask, a batch at a time.

Each text is tokenised once, whole. A token is trained on when all of it lies in a span; one that reaches into the
header before it could not be generated, and is not. What the marked tokens decode to must be the text they stand for.
"""

import hashlib
import json
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from eagle3_core.data.conversations import Conversation, Row, TokenRow
from eagle3_core.data.spans import ChatTemplate, Rendered, SpanFinder
from eagle3_core.errors import BadRow

MAX_CHARACTERS = 4 << 20
"""Of one conversation; about a million tokens, which take about a gigabyte while they are made."""


class Encoded(Protocol):
    """Tokens of a text and where they stand in it, as `tokenizers.Encoding` tells them; places do not descend."""

    @property
    def ids(self) -> list[int]:
        """Token ids."""
        ...

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Each token's (start, end) characters."""
        ...

    def char_to_token(self, char_pos: int) -> int | None:
        """The first token a character belongs to, if any."""
        ...

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """(start, end) characters of a token; None behind the last one."""
        ...


@dataclass(frozen=True)
class Spelled:
    """An `Encoded` of lists, for tokenizers whose places are found in Python."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def char_to_token(self, char_pos: int) -> int | None:
        """The first token a character belongs to, if any."""
        return next((i for i, (start, end) in enumerate(self.offsets) if start <= char_pos < end), None)

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """(start, end) characters of a token; None behind the last one."""
        return self.offsets[token_index] if token_index < len(self.offsets) else None


class ChatTokenizer(ChatTemplate, Protocol):
    """What is needed of a tokenizer with a chat template."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Encoded | BadRow]:
        """Tokens of each text, or why there are none; no special tokens are added."""
        ...

    def decode_batch(self, rows: Sequence[list[int]]) -> list[str]:
        """The text of each row of token ids, control tokens included."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a turn or a text, as configs say."""
        ...


@dataclass(frozen=True)
class MaskedRow:
    """A row on its way to the file: token ids and, of the same length, 1 where they are trained on."""

    token_ids: list[int]
    loss_mask: bytes

    @property
    def prompt(self) -> str:
        """Digest of what precedes the first answer; rows of one prompt share it."""
        first = self.loss_mask.find(1)
        asked = self.token_ids if first < 0 else self.token_ids[:first]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]

    def cut(self, max_seq_len: int) -> "MaskedRow":
        """The row's first `max_seq_len` tokens."""
        if len(self.token_ids) <= max_seq_len:
            return self
        return MaskedRow(self.token_ids[:max_seq_len], self.loss_mask[:max_seq_len])

    @property
    def is_trainable(self) -> bool:
        """Whether any row counts at the first TTT step: two supervised tokens in a row behind the first one."""
        return b"\x01\x01" in self.loss_mask[1:]

    def tensors(self) -> TokenRow:
        """The same as tensors."""
        ids = torch.tensor(self.token_ids, dtype=torch.int64)
        return TokenRow(ids, torch.tensor(list(self.loss_mask), dtype=torch.bool), self.prompt)


def render_rows(finder: SpanFinder, rows: Sequence[Row | BadRow]) -> list[Rendered | Row | BadRow]:
    """Conversations rendered; what was tokenised before, and what cannot be used, as it is."""
    return [_rendered(finder, row) if isinstance(row, Conversation) else row for row in rows]


def _rendered(finder: SpanFinder, conversation: Conversation) -> Rendered | BadRow:
    if not any(message["role"] == "assistant" for message in conversation.messages):
        return BadRow("nothing_to_train", "no assistant message" if conversation.messages else "no messages")
    try:
        _check_length(sum(len(message["content"]) for message in conversation.messages))
        rendered = finder.find(conversation)
        _check_length(len(rendered.text))
        rendered.text.encode()
    except BadRow as error:
        return error
    except UnicodeEncodeError as error:
        return BadRow(
            "not_unicode", f"holds half a surrogate pair, {error.object[error.start]!r}, which is no character"
        )
    except RecursionError:
        return BadRow("too_deep", "values within values, hundreds of levels deep, in a tool call or in `tools`")
    if not rendered.spans:
        return BadRow("nothing_to_train", "no assistant message answers anything")
    return rendered


def _check_length(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise BadRow("too_long", f"{characters:,} characters; up to {MAX_CHARACTERS:,} are tokenised")


def mask_texts(tokenizer: ChatTokenizer, rendered: Sequence[Rendered]) -> list[MaskedRow | BadRow]:
    """Tokens and mask of each text."""
    encoded = tokenizer.encode_batch([one.text for one in rendered])
    ids = [[] if isinstance(one, BadRow) else one.ids for one in encoded]
    found = [
        [] if isinstance(one, BadRow) else [_tokens_of(span, one) for span in text.spans]
        for text, one in zip(rendered, encoded, strict=True)
    ]
    pieces = [row[span.first : span.behind] for row, spans in zip(ids, found, strict=True) for span in spans]
    decoded = iter(tokenizer.decode_batch(pieces))
    return [
        one if isinstance(one, BadRow) else _masked(text.text, row, spans, [next(decoded) for _ in spans])
        for text, one, row, spans in zip(rendered, encoded, ids, found, strict=True)
    ]


class _Tokens(NamedTuple):
    """Tokens first .. behind - 1, which stand for characters start .. end - 1."""

    first: int
    behind: int
    start: int
    end: int


def _masked(text: str, ids: list[int], spans: list[_Tokens], decoded: list[str]) -> MaskedRow | BadRow:
    mask = bytearray(len(ids))
    for span, said in zip(spans, decoded, strict=True):
        meant = text[span.start : span.end]
        if span.first >= span.behind or not _same(said, meant):
            return BadRow("decodes_differently", f"the tokens of {meant!r:.60} decode to {said!r:.60}")
        mask[span.first : span.behind] = b"\x01" * (span.behind - span.first)
    if 0 not in mask:
        return BadRow("all_trained", "all of it would be trained on: the template writes nothing before the answer")
    return MaskedRow(ids, bytes(mask))


def _tokens_of(span: tuple[int, int], encoded: Encoded) -> _Tokens:
    """The tokens that lie in a span."""
    start, end = span
    first, last = encoded.char_to_token(start), encoded.char_to_token(end - 1)
    if first is not None and last is not None:
        opening, closing, following = (encoded.token_to_chars(i) for i in (first, last, last + 1))
        ends_there = closing is not None and closing[1] == end and (following is None or following[1] > end)
        if opening is not None and opening[0] == start and ends_there:
            return _Tokens(first, last + 1, start, end)
    return _tokens_by_offsets(start, end, encoded.offsets)


def _tokens_by_offsets(start: int, end: int, offsets: list[tuple[int, int]]) -> _Tokens:
    """The same where a token reaches over an edge, or blanks at an edge have no place of their own."""
    first = bisect_left(offsets, (start, 0))
    while first < len(offsets) and offsets[first] == (start, start):
        # Some tokenizers trim blanks off their offsets: a token of blanks alone stands, empty, at its end.
        first += 1
    behind = bisect_right(offsets, (end, end))
    while behind > first and offsets[behind - 1][1] > end:
        behind -= 1
    return _Tokens(first, behind, offsets[first][0] if first < behind else start, end)


def _same(decoded: str, meant: str) -> bool:
    """Decoders may drop or add a blank where pieces meet, and normalisers put characters into another form."""
    if decoded == meant or decoded.replace(" ", "") == meant.replace(" ", ""):
        return True
    return any(
        decoded.replace(" ", "") == unicodedata.normalize(form, meant).replace(" ", "") for form in ("NFC", "NFKC")
    )


def runs(token_ids: Sequence[int], loss_mask: Sequence[int]) -> list[tuple[list[int], bool]]:
    """Token ids in runs that are trained on and runs that are not."""
    found: list[tuple[list[int], bool]] = []
    for token, flag in zip(token_ids, loss_mask, strict=True):
        if not found or found[-1][1] != bool(flag):
            found.append(([], bool(flag)))
        found[-1][0].append(int(token))
    return found
