"""Where the assistant's words stand in the one rendering of a conversation, to the character.

The conversation is rendered as it is, and once more with private-use characters in it, marks that say of which message
they are. Without its marks the second text must be the first one; then each mark's place is a place in the first.

    <|im_start|>user\n sum?|<|im_end|>\n<|im_start|>assistant\n <think>\n<r>\n</think>\n\n[four] <|im_end|>\n
                          |       header, found in what stands   ^                      ^    ^ end of turn
                      a mark      between two messages         start                       end, the token included

A span starts behind the generation prompt, as a server would write it, and ends with the token that ends the turn: what
the verifier itself would emit, whatever the template put in place of the content or around it. Marks stand inside the
blanks around a text and inside think tags, so that templates that trim, split or look for tags do what they always do.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from eagle3_core.data.conversations import REASONING, TRAINED, Conversation, Message
from eagle3_core.errors import BadData, BadRow

Span = tuple[int, int]
"""Start and end, characters."""

_BASE = 0x100000
_ANSWER_OPENS, _ANSWER_ENDS, _OPENS, _ENDS, _CALL, _ARGUMENT, _OTHER = range(7)
_KINDS = 7
_LAST = 0x10FFFD
_MARK = re.compile(f"[{chr(_BASE)}-{chr(_LAST)}]")
_MAX_MESSAGES = (_LAST - _BASE + 1) // _KINDS
TEMPLATE_REFUSES = "template_refuses"
"""Reason of rows the template raises an error for."""

_THINK_TAG = re.compile(r"(</?think>)")


class ChatTemplate(Protocol):
    """What is needed of a tokenizer to render conversations."""

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """The text of a conversation; BadRow where the template refuses it."""
        ...

    def render_tracked(self, conversation: Conversation) -> tuple[str, list[Span]] | None:
        """The text and its `{% generation %}` blocks; None where the template has none."""
        ...

    @property
    def special_texts(self) -> frozenset[str]:
        """Texts that are one token each, whatever stands around them: control tokens, tags."""
        ...

    @property
    def stop_texts(self) -> frozenset[str]:
        """Those of them that end a turn or a text, as configs say."""
        ...


@dataclass(frozen=True)
class Rendered:
    """The one rendering of a conversation and the spans to train on, in order, none empty."""

    text: str
    spans: list[Span]


@dataclass(frozen=True)
class _Style:
    """What of a tool call is marked, and where a text that is blank: templates trim on either side."""

    calls_by: Literal["name", "id"] = "name"
    blanks_first: bool = False


@dataclass(frozen=True)
class _Header:
    """What stands before an answer, in the forms it may have; whether it is the template's generation prompt."""

    forms: tuple[str, ...]
    is_prompt: bool


@dataclass(frozen=True)
class _Marked:
    """Marks of one rendering: (kind, message, place in the text without marks), in order of place."""

    text: str
    marks: list[tuple[int, int, int]]

    def without_echoes(self, messages: list[Message]) -> "_Marked":
        """Each tool call marked once: harmony's templates name a call again in the header of its result."""
        left = [len(message.get("tool_calls", ())) for message in messages]
        marks = []
        for kind, number, place in self.marks:
            if kind == _CALL:
                left[number] -= 1
            if kind != _CALL or left[number] >= 0:
                marks.append((kind, number, place))
        return _Marked(self.text, marks)

    def by_message(self) -> dict[int, list[int]]:
        """Places of each message's marks, ascending."""
        places: dict[int, list[int]] = {}
        for _, number, place in self.marks:
            places.setdefault(number, []).append(place)
        return places


@dataclass
class SpanFinder:
    """Finds spans; what is asked of the template itself is asked once."""

    template: ChatTemplate
    _headers: dict[tuple[str, ...], _Header] = field(default_factory=dict)
    _ends: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self._special = re.compile("|".join(map(re.escape, sorted(self.template.special_texts, key=len, reverse=True))))

    def find(self, conversation: Conversation) -> Rendered:
        """The text of a conversation and what of it the assistant said.

        Raises:
            BadRow: the template refuses the conversation, leaves out or rewrites what it should render, or the spans
                cannot be told exactly.
        """
        try:
            rendered = self._find(conversation)
        except BadRow as error:
            if error.reason != TEMPLATE_REFUSES or not _calls_of(conversation):
                raise
            return self._find(_with_texts_for_arguments(conversation))
        if any(_is_written_as_python(call, rendered.text) for call in _calls_of(conversation)):
            return self._find(_with_texts_for_arguments(conversation))
        return rendered

    def _find(self, conversation: Conversation) -> Rendered:
        tracked = self.template.render_tracked(conversation)
        if tracked is not None:
            text, spans = tracked[0], self._tracked(conversation, *tracked)
        else:
            text = self.template.render(conversation)
            marked = self._marked(conversation, text)
            _refuse_what_is_left_out(conversation, marked)
            spans = list(self._spans(conversation, marked))
        if conversation.tools and self.template.render(Conversation(conversation.messages)) == text:
            raise BadRow("tools_not_rendered", "the chat template leaves `tools` out: put them into the system message")
        return Rendered(text, spans)

    def _marked(self, conversation: Conversation, text: str) -> _Marked:
        if _MARK.search(text) or len(conversation.messages) > _MAX_MESSAGES:
            raise BadRow("cannot_be_marked", "holds characters of plane 16 (private use), or too many messages")
        for style in (_Style(), _Style(blanks_first=True)):
            marked = _read_marks(self.template.render(_with_marks(conversation, style)))
            if marked.text == text:
                break
        else:
            raise BadRow(
                "template_not_traceable",
                "the chat template renders other text than it was given, so that the answers cannot be told exactly; "
                "put {% generation %} around them in the template",
            )
        if len(_calls_of(conversation)) > sum(kind == _CALL for kind, _, _ in marked.marks):
            # Some templates write a call's id alone; others want ids of a certain length.
            by_id = _read_marks(self.template.render(_with_marks(conversation, replace(style, calls_by="id"))))
            marked = by_id if by_id.text == text else marked
        return marked.without_echoes(conversation.messages)

    def _spans(self, conversation: Conversation, marked: _Marked) -> Iterator[Span]:
        """Of every assistant turn but a first one, which answers nothing."""
        text, messages, places = marked.text, conversation.messages, marked.by_message()
        before = 0
        for number, message in enumerate(messages):
            own = places.get(number, [])
            if message["role"] == "assistant" and number:
                if not own:
                    raise BadRow("empty_answer_not_rendered", f"message {number + 1} says nothing the template renders")
                start = self._start(conversation, number, text, _behind(messages[number - 1], before, text), own[0])
                later = next((later for later in range(number + 1, len(messages)) if later in places), None)
                limit = len(text) if later is None else _before(messages[later], places[later][0], text)
                end = self._end(text, own[-1], limit, "tool_calls" in message, number, number == len(messages) - 1)
                if not before <= start <= end:
                    raise BadRow("cannot_be_masked", f"the parts of message {number + 1} are not in their order")
                # Else it is empty, in a template without a token that ends turns.
                if start < end and message.get(TRAINED, True):
                    yield start, end
                before = end
            elif own:
                before = max(before, own[-1])

    def _start(self, conversation: Conversation, number: int, text: str, begin: int, end: int) -> int:
        """Where the answer at `number` starts, between the content before it and its own first mark."""
        header = self._header(conversation, number)
        for form in header.forms:
            found = text.rfind(form, begin, end)
            if found < 0:
                continue
            start = found + len(form)
            if header.is_prompt or not _THINK_TAG.sub("", text[start:end]).strip():
                return start
            return _behind_role(conversation.messages[number], text, start, end)
        raise BadRow("no_header", f"no generation prompt is found before message {number + 1}")

    def _header(self, conversation: Conversation, number: int) -> _Header:
        """What a server writes before the answer at `number`: the generation prompt, else what ends the turn before.

        A prompt that opens a think block comes in a second form, as templates drop such blocks from earlier turns.
        """
        key = tuple(message["role"] for message in conversation.messages[max(0, number - 2) : number])
        if key not in self._headers:
            last = conversation.messages[number - 1] | {"content": "x" + chr(_BASE)}
            prefix = Conversation([*conversation.messages[: number - 1], last], conversation.tools)
            try:
                bare, asked = (_tail(self.template.render(prefix, prompt)) for prompt in (False, True))
            except BadData as error:
                raise BadRow(TEMPLATE_REFUSES, f"before message {number + 1}: {error}") from error
            prompt = asked[len(bare) :] if asked.startswith(bare) else asked
            forms = (prompt or asked, _THINK_TAG.split(prompt or asked)[0])
            self._headers[key] = _Header(tuple(dict.fromkeys(form for form in forms if form)), bool(prompt))
        return self._headers[key]

    def _end(self, text: str, begin: int, limit: int, calls: bool, number: int, is_last: bool = False) -> int:
        """Behind the token that ends the turn; behind the content where the template has none."""
        ends = [(at, word) for word in self.ends if (at := text.find(word, begin, limit)) >= 0]
        at, word = min(ends, key=lambda end: (end[0], -len(end[1])), default=(-1, ""))
        if at >= 0 and (calls or at == begin or not self._special.sub("", text[begin:at]).strip()):
            return at + len(word)
        if calls and is_last:
            return begin + len(text[begin:].rstrip())
        if calls:
            raise BadRow("no_end_of_turn", f"nothing ends the tool call of message {number + 1}")
        return begin

    @property
    def is_used(self) -> bool:
        """Whether the template was asked for anything yet."""
        return self._ends is not None

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts of the tokens that end an assistant turn: those of the configs, and what the template itself writes."""
        if self._ends is None:
            talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x" + chr(_BASE)}]
            found = set(self.template.stop_texts)
            try:
                prompt = self._header(Conversation([talk[0], talk[0]]), 1).forms[0]
                tails = [_tail(self.template.render(Conversation(talk)))]
                tails.append(_tail(self.template.render(Conversation(talk), True)).removesuffix(prompt))
            except BadData:
                tails = []  # an unusual template, which may say no more than the configs
            for tail in tails:
                specials = list(self._special.finditer(tail)) if self.template.special_texts else []
                if specials and not self._special.sub("", tail).strip():
                    found.add(specials[-1].group())
            self._ends = tuple(sorted(found))
        return self._ends

    def _tracked(self, conversation: Conversation, text: str, blocks: list[Span]) -> list[Span]:
        """By the blocks of the template, each with the token that ends its turn and without what a server writes."""
        blocks = [block for block in blocks if block[0] < block[1]]
        limits = [*(start for start, _ in blocks), len(text)][1:]
        prompts = self._prompts(conversation) if blocks else ()
        trimmed = [self._trimmed(text, block, limit, prompts) for block, limit in zip(blocks, limits, strict=True)]
        spans = [(start, end) for start, end in trimmed if start < end and not self._is_behind_a_turn(text, start, end)]
        place, left_out = 0, set()
        for number, message in enumerate(conversation.messages):
            if message["role"] != "assistant" or not number:
                continue
            answer = _THINK_TAG.split(message["content"])[-1].strip()
            for said in filter(None, (answer, *(call["function"]["name"] for call in message.get("tool_calls", ())))):
                found = ((text.find(said, max(place, start), end), (start, end)) for start, end in spans)
                at, span = next(((at, span) for at, span in found if at >= 0), (-1, None))
                if span is None:
                    what = f"{said!r:.40} of message {number + 1}"
                    raise BadRow(
                        "answer_not_generated", f"{what} stands in no {{% generation %}} block of the template"
                    )
                place = at + len(said)
                if not message.get(TRAINED, True):
                    left_out.add(span)
        return [span for span in spans if span not in left_out]

    def _is_behind_a_turn(self, text: str, start: int, end: int) -> bool:
        """Whether a block holds control tokens alone, and the turn before it has ended."""
        return not self._special.sub("", text[start:end]).strip() and text[:start].rstrip().endswith(self.ends)

    def _prompts(self, conversation: Conversation) -> tuple[str, ...]:
        """What the template writes to have an answer begin, the longest first."""
        try:
            asked = [n for n, message in enumerate(conversation.messages) if n and message["role"] == "assistant"]
            headers = [self._header(conversation, number) for number in asked]
        except BadRow:
            return ()  # a template that renders whole conversations alone
        forms = {form for header in headers if header.is_prompt for form in header.forms}
        return tuple(sorted(forms, key=len, reverse=True))

    def _trimmed(self, text: str, block: Span, limit: int, prompts: tuple[str, ...]) -> Span:
        """A block from behind the generation prompt, where it stands in it, to the token that ends the turn.

        Templates for fine-tuning often put the header into the block, and the line end behind the last token.
        """
        start, end = block
        for prompt in prompts:
            at = text.rfind(prompt, max(0, start - len(prompt) + 1), min(end, start + len(prompt)))
            if at >= 0 and not (at == start and any(text.endswith(other, 0, start) for other in prompts)):
                start = at + len(prompt)
                break
        said = len(text[start:end].rstrip())
        if any(text.endswith(word, start, start + said) for word in self.ends):
            return start, start + said
        return start, self._end(text, end, limit, False, 0)


def _calls_of(conversation: Conversation) -> list[dict[str, Any]]:
    return [call for message in conversation.messages for call in message.get("tool_calls", ())]


def _is_written_as_python(call: dict[str, Any], text: str) -> bool:
    """Whether a template that wants JSON text has printed an object."""
    arguments = call["function"]["arguments"]
    written = str(arguments)
    return written in text and written != json.dumps(arguments, ensure_ascii=False)


def _with_texts_for_arguments(conversation: Conversation) -> Conversation:
    """A copy for templates that take the arguments of a tool call as JSON text."""

    def written(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": arguments}}

    messages = [
        message | {"tool_calls": [written(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in conversation.messages
    ]
    return Conversation(messages, conversation.tools)


def _with_marks(conversation: Conversation, style: _Style) -> Conversation:
    """A copy with marks: bounds around what the assistant said, one in the middle of what others said."""
    messages = [_marked_message(message, number, style) for number, message in enumerate(conversation.messages)]
    return Conversation(messages, conversation.tools)


def _marked_message(message: Message, number: int, style: _Style) -> Message:
    base = _BASE + _KINDS * number
    content = message["content"]
    if message["role"] != "assistant":
        return message | {"content": chr(base + _OTHER).join(_halves(content))} if content.strip() else message
    marked = dict(message)
    if content.strip() or "tool_calls" not in message:
        marked["content"] = _mark_text(content, base, True, style)
    for name in REASONING:
        if message.get(name):
            marked[name] = _mark_text(message[name], base, False, style)
    if "tool_calls" in message:
        marked["tool_calls"] = [_marked_call(call, base, style) for call in message["tool_calls"]]
    return marked


def _marked_call(call: dict[str, Any], base: int, style: _Style) -> dict[str, Any]:
    mark, function = chr(base + _CALL), call["function"]
    function = function | {"arguments": _marked_values(function["arguments"], chr(base + _ARGUMENT))}
    if style.calls_by == "id":
        return call | {"function": function} | ({"id": call["id"] + mark} if "id" in call else {})
    return call | {"function": function | {"name": function["name"] + mark}}


def _marked_values(value: object, mark: str) -> object:
    """With a mark behind every text in it: what ends the turn comes after the last."""
    if isinstance(value, str):
        return value + mark
    if isinstance(value, dict):
        return {name: _marked_values(part, mark) for name, part in value.items()}
    return [_marked_values(part, mark) for part in value] if isinstance(value, list) else value


def _mark_text(text: str, base: int, is_answer: bool, style: _Style) -> str:
    """Between its think tags, each part marked inside the blanks around it; the last part also where it is blank."""
    parts = _THINK_TAG.split(text)
    for index in range(0, len(parts), 2):
        last = is_answer and index == len(parts) - 1
        opens, ends = (_ANSWER_OPENS, _ANSWER_ENDS) if last else (_OPENS, _ENDS)
        part, said = parts[index], parts[index].strip()
        if said or last:
            before = len(part) - len(part.lstrip()) if said or style.blanks_first else 0
            behind = before + len(said)
            parts[index] = part[:before] + chr(base + opens) + said + chr(base + ends) + part[behind:]
    return "".join(parts)


def _read_marks(text: str) -> _Marked:
    parts = _MARK.split(text)
    marks, place = [], 0
    for part, mark in zip(parts, _MARK.findall(text), strict=False):
        place += len(part)
        number, kind = divmod(ord(mark) - _BASE, _KINDS)
        marks.append((kind, number, place))
    return _Marked("".join(parts), marks)


def _halves(content: str) -> tuple[str, str]:
    """What others said, parted in the middle, with the blanks around it."""
    middle = len(content) - len(content.lstrip()) + len(content.strip()) // 2
    return content[:middle], content[middle:]


def _behind(message: Message, mark: int, text: str) -> int:
    """Where the content before a header ends: of others it is marked in the middle."""
    rest = "" if message["role"] == "assistant" else _halves(message["content"])[1].rstrip()
    return mark + len(rest) if text.startswith(rest, mark) else mark


def _before(message: Message, mark: int, text: str) -> int:
    """Where the content behind a turn begins."""
    first = "" if message["role"] == "assistant" else _halves(message["content"])[0].lstrip()
    return mark - len(first) if text.endswith(first, 0, mark) else mark


def _behind_role(message: Message, text: str, start: int, mark: int) -> int:
    """The start where no generation prompt says it: what the template writes before the words is their header."""
    think = _THINK_TAG.search(text, start, mark)
    if think is not None:
        return think.start()
    content = message["content"]
    if not content.strip() and "tool_calls" in message:
        raise BadRow(
            "no_header", "the chat template has no generation prompt, and a tool call stands behind its header"
        )
    blanks = content[: len(content) - len(content.lstrip())]
    return mark - len(blanks) if text.endswith(blanks, start, mark) else mark


def _tail(text: str) -> str:
    """What stands behind the last mark."""
    return _MARK.split(text)[-1]


def _refuse_what_is_left_out(conversation: Conversation, marked: _Marked) -> None:
    """Every message must be rendered, once where the assistant said it, and answers as they were said."""
    places: dict[tuple[int, int], list[int]] = {}
    for kind, number, place in marked.marks:
        places.setdefault((kind, number), []).append(place)
    for number, message in enumerate(conversation.messages):
        where, role = f"message {number + 1}", message["role"]
        if role != "assistant":
            if role in ("user", "tool") and message["content"].strip() and (_OTHER, number) not in places:
                raise BadRow("message_not_rendered", f"the chat template leaves out {where}, of role {role}")
            continue
        calls = message.get("tool_calls", ())
        if len(places.get((_CALL, number), ())) < len(calls):
            raise BadRow("tool_calls_not_rendered", f"the chat template leaves out the tool calls of {where}")
        if calls and not message["content"].strip():
            continue
        opens, ends = (places.get((kind, number), []) for kind in (_ANSWER_OPENS, _ANSWER_ENDS))
        said = _THINK_TAG.split(message["content"])[-1].strip()
        if len(opens) != 1 or len(ends) != 1 or marked.text[opens[0] : ends[0]] != said:
            raise BadRow("answer_changed", f"the chat template changed {where}; it cannot be masked exactly")
