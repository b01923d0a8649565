"""Rows of training data in every form they come in, each made into a conversation or into tokens.

{"messages": [{"role", "content", "tool_calls"?, "reasoning_content"?}, ...], "tools"?}      as chat APIs write them
{"conversations": [{"from", "value"}, ...], "system"?, "tools"?}                             ShareGPT
{"input_ids": [...], "loss_mask": [...]}                                                     tokenised before

Keys and roles of the first two may be mixed within a row. What a row means is decided here and nowhere else.
"""

import json
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eagle3_core.contract.jsonfiles import repeated_key
from eagle3_core.errors import BadRow

Message = dict[str, Any]
"""`role` is one of ROLES' values, `content` a text; `tool_calls`, where there, a list that is not empty."""

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""What speakers are called, and who that is; the last two say a tool call, as JSON, in place of a text."""

_CALLS = ("function_call", "tool_call")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant message that hold what it thought, by the names templates know."""

TRAINED = "train"
"""False in a message whose answer is not to be trained on."""

FORMS = ("messages", "conversations", "input_ids")
"""Keys that make a row, one of them each."""

KEYS = (*FORMS, "loss_mask", "system", "tools")
"""All keys of a row that are read."""

_SHAPE = (
    'expected {"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]} or '
    '{"input_ids", "loss_mask"}'
)


@dataclass(frozen=True)
class Conversation:
    """Messages in one form, and the JSON schemas of the tools they may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Tokenised:
    """A row that was tokenised before: ids and, of the same length, 0 or 1 each."""

    token_ids: list[int]
    loss_mask: bytes


Row = Conversation | Tokenised


@dataclass(frozen=True)
class TokenRow:
    """One conversation: token_ids int64 [T], loss_mask bool [T], and a digest of what precedes the first answer."""

    token_ids_T: Tensor
    loss_mask_T: Tensor
    prompt: str


def parse_line(raw: bytes) -> Row:
    """The row of one line of a JSONL file, without its line end.

    Raises:
        BadRow: it is not UTF-8, not JSON, no row, or one that cannot be used; the caller adds file and line.
    """
    try:
        value = _decoded(raw.decode("utf-8"))
    except BadRow:
        raise
    except UnicodeDecodeError as error:
        raise BadRow("not_utf8", f"not UTF-8 at byte {error.start}", damaged=True) from error
    except json.JSONDecodeError as error:
        raise BadRow("not_json", _not_json(raw, error), damaged=True) from error
    except (RecursionError, ValueError) as error:
        raise BadRow("not_json", f"not JSON ({error})", damaged=True) from error
    return parse_row(value)


def _not_json(raw: bytes, error: json.JSONDecodeError) -> str:
    if raw.strip() in (b"[", b"{"):
        return "not JSON: one value over many lines; write one row a line"
    hint = "; more than one value on the line?" if error.msg == "Extra data" else "; is the line cut?"
    return f"not JSON ({error.msg} at column {error.colno}){hint}"


def _decoded(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (name := repeated_key(pairs)) is not None:
        raise BadRow("duplicate_key", f"the key {name!r:.80} occurs twice in one object", damaged=True)
    return dict(pairs)


def _no_number(word: str) -> None:
    raise BadRow("not_json", f"{word} is not JSON", damaged=True)


def parse_row(value: object) -> Row:
    """The row of a decoded value; columns that are null are absent.

    Raises:
        BadRow: it is no row, or one that cannot be used.
    """
    if not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else f"{value!r:.40}"
        raise BadRow("not_a_row", f"{kind} where an object is meant; {_SHAPE}", damaged=True)
    row = {name: part for name, part in value.items() if part is not None}
    forms = [name for name in FORMS if name in row]
    if len(forms) > 1:
        forms = (
            [name for name in forms if len(row[name])] if all(isinstance(row[name], list) for name in forms) else forms
        )
    if not forms:
        raise BadRow("not_a_row", f"{_SHAPE}; it has the keys {', '.join(row) or '(none)'!s:.80}", damaged=True)
    if len(forms) > 1:
        raise BadRow("ambiguous", f"holds {' and '.join(forms)}: which of them is the row?")
    return _tokenised(row) if forms[0] == "input_ids" else _conversation(row, forms[0])


def _tokenised(row: dict[str, Any]) -> Tokenised:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise BadRow("not_a_row", "input_ids is not a list of token ids", damaged=True)
    if not isinstance(mask, list) or not all(flag in (0, 1) for flag in mask):
        raise BadRow("not_a_row", "loss_mask, which input_ids needs, is not a list of 0 and 1", damaged=True)
    if len(ids) != len(mask):
        raise BadRow("not_a_row", f"{len(ids)} input_ids, {len(mask)} in loss_mask", damaged=True)
    return Tokenised(ids, bytes(map(int, mask)))


def _conversation(row: dict[str, Any], form: str) -> Conversation:
    given = row[form]
    if isinstance(given, str):  # as tables without nested columns hold it
        try:
            given = _decoded(given)
        except (ValueError, RecursionError) as error:
            raise BadRow("not_a_row", f"{form} is a text that is not JSON ({error})", damaged=True) from error
    if not isinstance(given, list):
        raise BadRow("not_a_row", f"{form} is not a list; {_SHAPE}", damaged=True)
    messages = [_message(message, number) for number, message in enumerate(given, 1)]
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRow("not_a_row", f"`system` is {system!r:.40}, not a text", damaged=True)
    first = messages[0] if messages else {"role": "user"}
    if system and first["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    elif system and first["content"].strip() != system.strip():
        raise BadRow("ambiguous", "`system` and a first message of role system say different things")
    return Conversation(messages, _tools(row.get("tools")))


def _message(given: object, number: int) -> Message:
    """A message with `role` and `content`, whatever they are called."""
    if not isinstance(given, dict):
        raise BadRow("not_a_row", f"message {number} is not an object", damaged=True)
    message = {name: part for name, part in given.items() if part is not None}
    speaker = message.pop("role", message.pop("from", None))
    if not isinstance(speaker, str):
        raise BadRow(
            "not_a_row", f"every message needs a text `role` (or `from`); message {number} has none", damaged=True
        )
    role = ROLES.get(speaker.lower())
    if role is None:
        raise BadRow("unknown_role", f"message {number} is by {speaker!r:.40}; known are {', '.join(ROLES)}")
    content = message.pop("content", message.pop("value", None))
    message["role"] = role
    if not _is_trained(message, number):
        message[TRAINED] = False
    if speaker.lower() in _CALLS:
        message["content"], message["tool_calls"] = "", _said_calls(content, number)
        return message
    # The older form of one call, which has no id.
    given_calls, older = message.pop("tool_calls", None), message.pop("function_call", None)
    calls = _calls(given_calls or ([older] if older else None), number)
    if calls:
        message["tool_calls"] = calls
    # One field, which servers, templates and data call by three names.
    thoughts = [message[name] for name in REASONING if name in message]
    if thoughts and all(thought == thoughts[0] for thought in thoughts):
        message |= dict.fromkeys(REASONING, thoughts[0])
    if not all(isinstance(message.get(name, ""), str) for name in REASONING):
        raise BadRow("not_a_row", f"the reasoning of message {number} is not a text", damaged=True)
    said_otherwise = bool(calls) or any(message.get(name) for name in REASONING)
    message["content"] = _text(content, number, role == "assistant" and said_otherwise)
    return message


def _is_trained(message: Message, number: int) -> bool:
    """Whether an answer is to be trained on, as the row says of it: OpenAI's `weight`, Axolotl's `train`."""
    weight, train = message.pop("weight", 1), message.pop("train", True)
    if weight not in (0, 1) or not isinstance(train, bool):
        raise BadRow("bad_weight", f"message {number}: `weight` is 0 or 1 and `train` true or false")
    return bool(weight) and train


def _text(content: object, number: int, may_be_absent: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_absent:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        others = [part.get("type") for part in content if not isinstance(part.get("text"), str)]
        if others:
            raise BadRow(
                "not_text", f"message {number} holds a part of type {others[0]!r:.40}; only text can be trained on"
            )
        return "".join(part["text"] for part in content)
    raise BadRow(
        "not_a_row", f"every message needs a text `content` (or `value`); message {number} has none", damaged=True
    )


def _calls(given: object, number: int) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object, which is how servers hand them to the template."""
    if given is None or given == []:
        return []
    calls = []
    for call in given if isinstance(given, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow("bad_tool_call", f"message {number}: a tool call is {{'function': {{'name', 'arguments'}}}}")
        arguments = _arguments(function.get("arguments", {}), number)
        named = {"id": call["id"]} if isinstance(call, dict) and isinstance(call.get("id"), str) else {}
        calls.append({**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _arguments(given: object, number: int) -> object:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given, parse_constant=_no_number) if given.strip() else {}
    except (ValueError, RecursionError) as error:
        raise BadRow(
            "bad_tool_call", f"message {number}: the arguments of a tool call are not JSON ({error})"
        ) from error


def _said_calls(content: object, number: int) -> list[dict[str, Any]]:
    try:
        said = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError) as error:
        raise BadRow("bad_tool_call", f"message {number} is a tool call that is not JSON ({error})") from error
    return _calls(said if isinstance(said, list) else [said], number)


def _tools(given: object) -> list[dict[str, Any]] | None:
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError) as error:
            raise BadRow("bad_tools", f"`tools` is a text that is not JSON ({error})") from error
    if given is None or given == []:
        return None
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise BadRow("bad_tools", "`tools` is not a list of JSON schemas")
    return given
