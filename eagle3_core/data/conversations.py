"""Conversations -> token ids and loss mask, through the verifier's own chat template.

The conversation is rendered once and tokenised once, with character offsets. An assistant turn's span runs from the
end of its generation prompt to its end-of-turn token, that token included: what the verifier itself would emit.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from eagle3_core.errors import BadData

Message = dict[str, str]


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer with a chat template."""

    def render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        """The text of a conversation; BadData where the template refuses it."""
        ...

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and each one's (start, end) characters; no special tokens are added."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens such as end of text and end of turn."""
        ...


@dataclass(frozen=True)
class TokenRow:
    """One conversation: token_ids int64 [T], loss_mask bool [T], and a digest of what precedes the first answer."""

    token_ids_T: Tensor
    loss_mask_T: Tensor
    prompt: str


def read_conversations(path: Path) -> Iterator[tuple[int, list[Message]]]:
    """(line number, messages) of each line of a JSONL file; blank lines are passed over.

    Raises:
        BadData: a line is not UTF-8, not JSON, or not a conversation; names the line.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, _parse(raw, f"{path}, line {number}")


def _parse(raw: bytes, where: str) -> list[Message]:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadData(f"{where}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise BadData(f"{where}: not JSON ({error.msg} at column {error.colno}); is the line cut?") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise BadData(f'{where}: expected {{"messages": [{{"role", "content"}}, ...]}}')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise BadData(f"{where}: every message needs a text `role` and a text `content`")
    if value.get("tools"):
        raise BadData(f"{where}: `tools` cannot be rendered; leave them out, or put them into the system message")
    return messages


def render(tokenizer: ChatTokenizer, messages: list[Message], add_generation_prompt: bool, where: str) -> str:
    """The text of a conversation.

    Raises:
        BadData: the chat template refuses it; names the place.
    """
    try:
        return tokenizer.render(messages, add_generation_prompt)
    except BadData as error:
        raise BadData(f"{where}: {error}") from error


def tokenize(tokenizer: ChatTokenizer, messages: list[Message], where: str) -> TokenRow:
    """Token ids and the mask of what the assistant said.

    Raises:
        BadData: the template refuses the conversation or rewrites earlier turns, an answer has nothing before it, or
            the masked text is not what was said.
    """
    if messages[0]["role"] == "assistant":
        raise BadData(f"{where}: begins with an assistant message, which answers nothing; give the user's turn first")
    text = render(tokenizer, messages, False, where)
    ids, offsets = tokenizer.encode(text)
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _prefix_length(tokenizer, messages[:turn], True, text, where)
        limit = _prefix_length(tokenizer, messages[: turn + 1], False, text, where)
        # A template may trim what was said; where it does not, the blanks behind it are part of the answer.
        ends = (_end_of(said, text, start, limit) for said in (message["content"], message["content"].strip()))
        end = next((end for end in ends if end is not None), None)
        if end is None:
            raise BadData(f"{where}: the chat template changed message {turn + 1}; it cannot be masked exactly")
        _mask_turn(ids, offsets, mask, (start, end), tokenizer.special_ids)
    first = mask.index(True) if True in mask else len(ids)
    digest = hashlib.sha256(json.dumps(ids[:first]).encode()).hexdigest()[:16]
    return TokenRow(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool), digest)


def _prefix_length(tokenizer: ChatTokenizer, messages: list[Message], prompt: bool, text: str, where: str) -> int:
    """Characters of `text` that these first messages render to."""
    rendered = render(tokenizer, messages, prompt, where)
    if not text.startswith(rendered):
        raise BadData(
            f"{where}: the chat template renders earlier turns differently once others follow; "
            "give each assistant turn a conversation of its own"
        )
    return len(rendered)


def _end_of(said: str, text: str, start: int, limit: int) -> int | None:
    """Where the answer ends: it stands right at the start, or behind what the template puts before it."""
    found = start if text.startswith(said, start, limit) else text.rfind(said, start, limit)
    return None if found < 0 else found + len(said)


def _mask_turn(
    ids: list[int],
    offsets: list[tuple[int, int]],
    mask: list[bool],
    span: tuple[int, int],
    special: frozenset[int],
) -> None:
    """Mark the tokens of the span and the end-of-turn token that follows directly."""
    start, end = span
    for index, (left, right) in enumerate(offsets):
        if left == right:
            # Some tokenizers trim blanks off their offsets: a token of blanks alone stands, empty, at its end.
            mask[index] = start < right <= end
        elif left >= end:
            mask[index] = ids[index] in special
            return
        elif left >= start:
            mask[index] = True


def cut(row: TokenRow, max_seq_len: int) -> TokenRow:
    """The row's first `max_seq_len` tokens."""
    return TokenRow(row.token_ids_T[:max_seq_len], row.loss_mask_T[:max_seq_len], row.prompt)
