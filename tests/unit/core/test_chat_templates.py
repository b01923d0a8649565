"""Chat templates as they are found in the wild, through a real tokenizer: what is masked, and what is refused.

Each is in the style of a family, in words of its own, with that family's control tokens.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from eagle3_core.data import tokens
from eagle3_core.data.conversations import Conversation, parse_row
from eagle3_core.data.spans import SpanFinder
from eagle3_core.data.tokens import MaskedRow, mask_texts, render_rows, runs
from eagle3_core.errors import BadInput, BadRow
from tests import tiny
from worker.hugging_face import HuggingFaceTokenizer

DEEP_CALL = '{"name": "f", "arguments": ' + '{"a":' * 900 + "1" + "}" * 901
HEAD, END = "{% for m in messages %}", "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
TEMPLATES = {
    "system": "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    + HEAD + PLAIN + END + PROMPT,
    "generation": HEAD + "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n" + END + PROMPT,
    "generation_without_end": HEAD + "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n" + END + PROMPT,
    "generation_elsewhere": HEAD + "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'user' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n" + END + PROMPT,
    "tuned": HEAD + "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}" + PLAIN
    + "{% endif %}" + END + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% else %}{% generation %}<|endoftext|>{% endgeneration %}{% endif %}",
    "tuned_within_the_header": HEAD + "{% if m.role == 'assistant' %}<|im_start|>assistant{% generation %}"
    "{{ '\\n' + m.content }}<|im_end|>{% endgeneration %}\n{% else %}" + PLAIN + "{% endif %}" + END + PROMPT,
    "trims": HEAD + "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n" + END + PROMPT,
    "begins": "{{ bos_token }}" + HEAD + PLAIN + END + PROMPT,
    "thinks": HEAD + "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m['content'].split('</think>')[-1] }}<|im_end|>\n" + END + PROMPT,
    "alternates": HEAD + "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + PLAIN + END + PROMPT,
    "stumbles": HEAD + "{{ m['content'].nowhere.at_all }}" + END,
    "broken": HEAD + "{{ m['content']",
    "shouts": HEAD + "<|im_start|>{{ m['role'] }}\n{{ m['content'] | upper }}<|im_end|>\n" + END + PROMPT,
    "counts": HEAD + "<|im_start|>{{ m['role'] }} {{ m['content'] | length }}\n{{ m['content'] }}<|im_end|>\n" + END
    + PROMPT,
    "deaf": HEAD + "{% if m['role'] != 'tool' %}" + PLAIN + "{% endif %}" + END + PROMPT,
    "no_header": HEAD + PLAIN + END + "{% if add_generation_prompt %}<|im_start|>bot\n{% endif %}",
    "llama-3": "{{ bos_token }}" + HEAD + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"parameters\": "
    "{{ c.function.arguments | tojson }}}{% endfor %}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>" + END
    + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.index0 == 1 %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}" + HEAD + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n" + END + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "harmony": HEAD + "{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}<|start|>assistant<|channel|>"
    "analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}<|start|>assistant to=functions."
    "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ loop.previtem.tool_calls[0].function.name }} to=assistant"
    "<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}" + END
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "deepseek": "{{ bos_token }}" + HEAD + "{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}"
    "<|tool_output|>{{ m.content }}<|tool_outputs_end|>{% elif m.tool_calls %}<|Assistant|>{{ m.content }}"
    "{% for c in m.tool_calls %}<|tool_call|>{{ c.function.name }}\n{{ '' + c.function.arguments }}"
    "<|tool_call_end|>{% endfor %}<|eos|>{% else %}{% if loop.previtem.role != 'tool' %}<|Assistant|>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}" + END
    + "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|><think>\n{% endif %}",
    "glm": "[gMASK]" + HEAD + "<|{{ m.role }}|>\n{{ m.content }}" + CALLS + END
    + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "alpaca": HEAD + "{% if m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n{% else %}### Response:\n"
    "{{ m.content }}\n\n{% endif %}" + END + "{% if add_generation_prompt %}### Response:\n{% endif %}",
    "prints": HEAD + "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments }}){% endfor %}<|im_end|>\n" + END + PROMPT,
    "no_prompt": HEAD + PLAIN + END,
    "kimi": HEAD + "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}{% if m.tool_calls %}"
    "<|tool_calls|>{% for c in m.tool_calls %}<|begin_call|>{{ c.id }}<|args|>{{ c.function.arguments | tojson }}"
    "<|call_end|>{% endfor %}<|tool_calls_end|>{% endif %}<|im_end|>" + END
    + "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
    "qwen3": "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}" + HEAD + "{% if m.role == 'assistant' %}"
    "{% set reason = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1] "
    "if '</think>' in m.content else '') %}{% set words = m.content.split('</think>')[-1].lstrip('\n') %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or reason) %}<think>\n"
    "{{ reason.strip('\n') }}\n</think>\n\n{% endif %}{{ words }}" + CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}" + PLAIN + "{% endif %}" + END + PROMPT,
}  # fmt: skip
CONTROL = {
    "llama-3": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "mistral": ("</s>", "[INST]", "[/INST]"),
    "gemma": ("<end_of_turn>", "<start_of_turn>"),
    "harmony": ("<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
    "deepseek": ("<|eos|>", "<|User|>", "<|Assistant|>", "<|tool_call|>", "<|tool_call_end|>", "<|tool_output|>",
                 "<|tool_outputs_end|>"),
    "glm": ("<|endoftext|>", "<|user|>", "<|assistant|>", "[gMASK]"),
    "kimi": ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_tool|>", "<|im_middle|>", "<|tool_calls|>",
             "<|tool_calls_end|>", "<|begin_call|>", "<|args|>", "<|call_end|>"),
}  # fmt: skip
"""Control tokens of a family besides those of the tiny tokenizer; the first ends a turn."""


def tokenizer_with(directory: Path, template: str | None = None, **config: Any) -> HuggingFaceTokenizer:
    directory.mkdir(exist_ok=True)
    tiny.make_tokenizer(directory)
    control = CONTROL.get(template or "", ())
    if control:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens(list(control))
        tokenizer.save(str(directory / "tokenizer.json"))
        config = {"eos_token": control[0]} | config
    if template is not None:
        (directory / "chat_template.jinja").write_text(TEMPLATES[template])
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return HuggingFaceTokenizer(directory)


def turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def unwanted(messages: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """The same conversation with fields on its first answer that say whether it is trained on."""
    return [messages[0], messages[1] | fields, *messages[2:]]


def row_of(tokenizer: HuggingFaceTokenizer, messages: list[dict[str, Any]], **more: Any) -> MaskedRow:
    row = parse_row({"messages": messages, **more})
    [rendered] = render_rows(SpanFinder(tokenizer), [row])
    if isinstance(rendered, BadRow):
        raise rendered
    [masked] = mask_texts(tokenizer, [rendered])
    if isinstance(masked, BadRow):
        raise masked
    return masked


def said(tokenizer: HuggingFaceTokenizer, messages: list[dict[str, Any]], **more: Any) -> list[str]:
    """The text of each run of supervised tokens."""
    row = row_of(tokenizer, messages, **more)
    return [tokenizer.decode(ids) for ids, trained in runs(row.token_ids, row.loss_mask) if trained]


def call(name: str, arguments: Any, content: str | None = None) -> dict[str, Any]:
    calls = [{"id": f"functions.{name}:0", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


ASKED = turns("sum of 1 and 2?")
SUMS = [*ASKED, call("add", '{"a": 1, "b": 2}'), {"role": "tool", "content": "3"}, turns("", "three")[1]]


@pytest.mark.parametrize(
    ("template", "messages", "wanted"),
    [
        ("system", turns("hi", "hello there"), ["hello there<|im_end|>"]),
        ("system", turns("hi", " a \n", "b", "\n c"), [" a \n<|im_end|>", "\n c<|im_end|>"]),
        ("system", turns("hi", "", "b", "c"), ["<|im_end|>", "c<|im_end|>"]),
        ("system", turns("hi", " \n ", "b", "c"), [" \n <|im_end|>", "c<|im_end|>"]),
        ("system", turns("hi", "a 🦅 b"), ["a 🦅 b<|im_end|>"]),
        ("system", turns("x<|im_end|>\n<|im_start|>assistant\ny", "a<|im_end|>b"), ["a<|im_end|>b<|im_end|>"]),
        ("system", turns("yes", "yes", "yes", "no"), ["yes<|im_end|>", "no<|im_end|>"]),
        ("system", [turns("", "welcome")[1], *turns("hi", "yes")], ["yes<|im_end|>"]),
        ("system", turns("hi", "<|im_start|>assistant\nhello"), ["<|im_start|>assistant\nhello<|im_end|>"]),
        ("generation", turns("hi", "hello"), ["hello<|im_end|>"]),
        ("generation", turns("hi", "hello", "a", "b"), ["hello<|im_end|>", "b<|im_end|>"]),
        ("generation_without_end", turns("hi", "hello", "a", "b"), ["hello<|im_end|>", "b<|im_end|>"]),
        ("generation", unwanted(turns("hi", "hello", "a", "b"), weight=0), ["b<|im_end|>"]),
        ("system", unwanted(turns("hi", "hello", "a", "b"), train=False), ["b<|im_end|>"]),
        ("system", unwanted(turns("hi", "hello", "a", "b"), weight=1, train=True), ["hello<|im_end|>", "b<|im_end|>"]),
        ("tuned", [*turns("hi"), {"role": "assistant", "content": "b", "thinking": "r"}, *turns("c", "d")],
         ["r\n</think>\n\nb<|im_end|>", "\n</think>\n\nd<|im_end|>"]),
        ("tuned_within_the_header", turns("hi", "\nhello", "b", ""), ["\nhello<|im_end|>", "<|im_end|>"]),
        ("generation", turns("hi", "<|im_start|>assistant\nhello"), ["<|im_start|>assistant\nhello<|im_end|>"]),
        ("trims", turns(" hi ", " hello \n"), ["hello<|im_end|>"]),
        ("trims", turns(" hi ", " \n", "a", "b"), ["<|im_end|>", "b<|im_end|>"]),
        ("thinks", turns("hi", "think"), ["<think>\n\n</think>\n\nthink<|im_end|>"]),
        ("thinks", turns("a", "b", "c", "d"), ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]),
        ("thinks", turns("a", "<think>x</think>b", "c", "d"), ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]),
        (None, [*turns("u", "one"), {"role": "assistant", "content": "two"}], ["one<|im_end|>", "two<|im_end|>"]),
        (None, [*turns("u", "f"), {"role": "tool", "content": "4"}, turns("", "g")[1]], ["f<|im_end|>", "g<|im_end|>"]),
        (None, [{"role": "system", "content": "s"}, turns("", "hello")[1]], ["hello<|im_end|>"]),
        ("llama-3", turns("hi ", " hello ", "b", "c"), ["hello<|eot_id|>", "c<|eot_id|>"]),
        ("llama-3", SUMS, ['{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', "three<|eot_id|>"]),
        ("mistral", turns("hi", "hello", "b", "c"), [" hello</s>", " c</s>"]),
        ("mistral", [{"role": "system", "content": "s"}, *turns("hi", "[/INST] x")], [" [/INST] x</s>"]),
        ("gemma", turns("hi", "hello\n", "b", "c"), ["hello<end_of_turn>", "c<end_of_turn>"]),
        ("harmony", turns("hi", "hello", "b", "c"),
         ["<|channel|>final<|message|>hello<|end|>", "<|channel|>final<|message|>c<|return|>"]),
        ("harmony", [*turns("hi", "hello")[:1], {"role": "assistant", "content": "four", "thinking": "2+2"}],
         ["<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>"]),
        ("harmony", SUMS[:3] + turns("and?", "ok"),
         [' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
          "<|channel|>final<|message|>ok<|return|>"]),
        ("harmony", SUMS, [' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
                           "<|channel|>final<|message|>three<|return|>"]),
        ("deepseek", turns("hi", "<think>x</think>hello", "b", "c"), ["hello<|eos|>", "c<|eos|>"]),
        ("deepseek", SUMS, ['<|tool_call|>add\n{"a": 1, "b": 2}<|tool_call_end|><|eos|>', "three<|eos|>"]),
        ("deepseek", [*ASKED, call("add", {"a": "<|eos|>"})],
         ['<|tool_call|>add\n{"a": "<|eos|>"}<|tool_call_end|><|eos|>']),
        ("trims", turns("hi", "<think> "), ["<think><|im_end|>"]),
        ("qwen3", [*ASKED, call("add", {}, "\n")],
         ['<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>']),
        ("glm", turns("hi", "hello", "<|im_end|>", "c"), ["hello", "c"]),
        ("glm", [*ASKED, call("add", {"a": "b "})],
         ['<tool_call>\n{"name": "add", "arguments": {"a": "b "}}\n</tool_call>']),
        ("glm", turns("hi", "hello", "b", "c"), ["hello", "c"]),
        ("prints", SUMS, ['add({"a": 1, "b": 2})<|im_end|>', "three<|im_end|>"]),
        ("no_prompt", turns("hi", " \n hello", "b", "<think>c</think>d"),
         [" \n hello<|im_end|>", "<think>c</think>d<|im_end|>"]),
        ("no_prompt", turns("hi", "", "b", " "), ["<|im_end|>", " <|im_end|>"]),
        ("alpaca", turns("hi", "### Response:\nhello", "b", ""), ["### Response:\nhello"]),
        ("kimi", turns("hi", "hello", "b", "c"), ["hello<|im_end|>", "c<|im_end|>"]),
        ("kimi", SUMS, ["<|tool_calls|><|begin_call|>functions.add:0<|args|>" '{"a": 1, "b": 2}'
                        "<|call_end|><|tool_calls_end|><|im_end|>", "three<|im_end|>"]),
        ("qwen3", turns("a", "<think>\nx\n</think>\n\nb", "c", "<think>\ny\n</think>\n\nd"),
         ["b<|im_end|>", "<think>\ny\n</think>\n\nd<|im_end|>"]),
        ("qwen3", turns("a", "b", "c", "d"), ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]),
        ("qwen3", [*turns("a"), {"role": "assistant", "content": "b", "reasoning": "r"}],
         ["<think>\nr\n</think>\n\nb<|im_end|>"]),
        ("qwen3", SUMS, ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
                         "<think>\n\n</think>\n\nthree<|im_end|>"]),
        ("qwen3", [*ASKED, call("add", {"a": "</tool_call>"}, "I add."),
                   turns("<tool_response>3</tool_response>")[0], turns("", "three")[1]],
         ['I add.<tool_call>\n{"name": "add", "arguments": {"a": "</tool_call>"}}\n</tool_call><|im_end|>',
          "<think>\n\n</think>\n\nthree<|im_end|>"]),
    ],
)  # fmt: skip
def test_what_is_masked(tmp_path: Path, template: str | None, messages: Any, wanted: list[str]) -> None:
    assert said(tokenizer_with(tmp_path, template), messages) == wanted


def test_a_token_that_ends_turns_by_its_meaning_alone_is_trained_on(tmp_path: Path) -> None:
    """GLM ends a turn with the token that begins the user's; only the verifier's configs say so."""
    tokenizer_with(tmp_path, "glm")
    user = HuggingFaceTokenizer(tmp_path).inner.convert_tokens_to_ids("<|user|>")
    assert isinstance(user, int)
    tokenizer = HuggingFaceTokenizer(tmp_path, eos_token_ids=[user])
    assert said(tokenizer, turns("hi", "hello", "b", "c")) == ["hello<|user|>", "c"]


def test_what_a_template_makes_too_long_to_tokenise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_CHARACTERS", len("four") + len("words"))
    finder = SpanFinder(tokenizer_with(tmp_path / "v", "trims"))
    [refused] = render_rows(finder, [parse_row({"messages": turns("four", "words")})])
    assert isinstance(refused, BadRow)
    assert refused.reason == "too_long"


def test_tools_are_rendered_or_the_row_is_refused(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    tokenizer = tokenizer_with(tmp_path / "a", "qwen3")
    row = row_of(tokenizer, SUMS, tools=json.dumps(tools))
    assert '"name": "add"}}]<|im_end|>' in tokenizer.decode(row.token_ids)
    with pytest.raises(BadRow, match="leaves `tools` out"):
        row_of(tokenizer_with(tmp_path / "b", "system"), turns("a", "b"), tools=tools)


def test_a_token_that_begins_a_text_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "begins", add_bos_token=True)
    ids = row_of(tokenizer, turns("hi", "hello")).token_ids
    assert ids.count(256) == 1
    assert ids[0] == 256


def test_blanks_whose_offsets_are_trimmed_are_masked_with_the_rest(tmp_path: Path) -> None:
    """Llama 3's tokenizer gives a token of blanks alone an empty span."""
    tokenizer_with(tmp_path)
    file = tmp_path / "tokenizer.json"
    trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": trimming}))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert (3, 3) in tokenizer.encode_batch(["if   x"])[0].offsets
    code = "def f():\n    return 1 "
    assert said(tokenizer, turns("hi ", code)) == [code + "<|im_end|>"]
    assert said(tokenizer, turns("hi ", "  " + code)) == ["  " + code + "<|im_end|>"]


def test_truncation_and_padding_of_the_tokenizers_own_file_do_not_count(tmp_path: Path) -> None:
    tokenizer_with(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=200)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert said(HuggingFaceTokenizer(tmp_path), turns("hi", "hello there")) == ["hello there<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "reason", "words"),
    [
        ("alternates", [{"role": "system", "content": "s"}, *turns("a", "b")], "template_refuses", "must alternate"),
        ("stumbles", turns("a", "b"), "template_refuses", "refuses this conversation: .*nowhere"),
        ("broken", turns("a", "b"), "template_refuses", "refuses this conversation: unexpected end of template"),
        ("shouts", turns("a", "b"), "answer_changed", "changed message 2"),
        ("counts", turns("a", "b"), "template_not_traceable", "renders other text than it was given"),
        ("deaf", [*turns("a", "b"), SUMS[2]], "message_not_rendered", "leaves out message 3, of role tool"),
        ("system", SUMS, "tool_calls_not_rendered", "leaves out the tool calls of message 2"),
        ("no_header", turns("a", "b"), "no_header", "no generation prompt is found before message 2"),
        ("generation_elsewhere", turns("a", "b"), "answer_not_generated", "'b' of message 2 stands in no .* block"),
        ("generation", SUMS, "answer_not_generated", "'add' of message 2 stands in no"),
        ("generation_without_end", SUMS[:2], "answer_not_generated", "'add' of message 2 stands in no"),
        ("generation_without_end", turns("a", ""), "nothing_to_train", "answers anything"),
        (None, turns("", "hello")[1:], "nothing_to_train", "answers anything"),
        (None, turns("hi"), "nothing_to_train", "no assistant message"),
        (None, [], "nothing_to_train", "no messages"),
        (None, turns("a", "b" * (1 << 23)), "too_long", "8,388,609 characters"),
        (None, turns("a", "\ud83d"), "not_unicode", "half a surrogate pair"),
        (None, turns("a", "\U00100000"), "cannot_be_marked", "plane 16"),
        (None, [*turns("a"), {"from": "function_call", "value": DEEP_CALL}], "too_deep", "hundreds of levels deep"),
    ],
)
def test_what_is_refused_says_why(tmp_path: Path, template: str | None, messages: Any, reason: str, words: str) -> None:
    with pytest.raises(BadRow, match=words) as error:
        said(tokenizer_with(tmp_path, template), messages)
    assert (error.value.reason, error.value.damaged) == (reason, False)


def test_a_tokenizer_without_a_template_is_refused_once_a_conversation_comes(tmp_path: Path) -> None:
    tokenizer_with(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = HuggingFaceTokenizer(tmp_path)
    with pytest.raises(BadInput, match="no chat template"):
        render_rows(SpanFinder(tokenizer), [Conversation(turns("a", "b"))])


@pytest.mark.usefixtures("code_cache")
def test_of_several_templates_one_has_to_be_the_default(tmp_path: Path) -> None:
    texts = {"default": TEMPLATES["trims"], "tool_use": TEMPLATES["qwen3"]}
    tokenizer_with(tmp_path, chat_template=[{"name": n, "template": t} for n, t in texts.items()])
    (tmp_path / "chat_template.jinja").unlink()
    assert said(HuggingFaceTokenizer(tmp_path), turns("a", " b ")) == ["b<|im_end|>"]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "rag", "template": texts["default"]}]})
    )
    tokenizer = HuggingFaceTokenizer(tmp_path)
    with pytest.raises(BadInput, match=r"no chat template is the default one: .*'rag'"):
        said(tokenizer, turns("a", "b"))


@pytest.mark.usefixtures("code_cache")
def test_a_tokenizer_in_python_has_its_places_found_by_what_its_tokens_spell(tmp_path: Path) -> None:
    """Its tokens hold two bytes, wherever they fall: an answer may begin and end inside a character."""
    tokenizer = HuggingFaceTokenizer(tiny.make_python_tokenizer(tmp_path / "pair"), allow_remote_code=True)
    assert not tokenizer.inner.is_fast
    for asked, answer in (("hi", "hello"), ("odd", "a 🦅 b"), ("é", "日本語 ok"), ("x", "a\ufffdb")):
        row = row_of(tokenizer, turns(asked, answer, asked, ""))
        texts = [(tokenizer.decode(ids), trained) for ids, trained in runs(row.token_ids, row.loss_mask)]
        assert "".join(text for text, _ in texts) == tokenizer.render(Conversation(turns(asked, answer, asked, "")))
        assert [text for text, trained in texts if trained] == [answer + "<|im_end|>", "<|im_end|>"]


@pytest.mark.usefixtures("code_cache")
def test_a_tokenizer_in_python_that_does_not_spell_its_text_is_refused(tmp_path: Path) -> None:
    code = tiny.make_python_tokenizer(tmp_path / "pair") / "tokenization_pair.py"
    code.write_text(code.read_text().replace("text.encode()", "text.lower().encode()"))
    tokenizer = HuggingFaceTokenizer(code.parent, allow_remote_code=True)
    with pytest.raises(BadRow, match="gives no character offsets, and its tokens do not spell the text: 'he'"):
        row_of(tokenizer, turns("a", "Hello"))


WORDS = st.sampled_from(
    (" ", "\n", "a", "é", "🦅", "ok", "<think>", "</think>", "<|im_end|>", "<|im_start|>assistant\n", "<|end|>", "</s>",
     "[/INST]", "<|eot_id|>", "### Response:\n", "<tool_call>", "{", '"', "USER:")
)  # fmt: skip
CHATS = st.lists(st.lists(WORDS, max_size=6).map("".join), min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0)
EXACT = ("system", "generation", "llama-3", "mistral", "gemma", "harmony", "glm", "kimi", "alpaca", "no_prompt")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, HuggingFaceTokenizer] = {}

    def find(name: str) -> HuggingFaceTokenizer:
        if name not in made:
            made[name] = tokenizer_with(tmp_path_factory.mktemp("family"), name)
        return made[name]

    return find


@pytest.mark.parametrize("template", EXACT)
@settings(max_examples=60, deadline=None)
@given(contents=CHATS)
def test_whatever_is_said_exactly_that_is_masked(family: Any, template: str, contents: list[str]) -> None:
    """One run an answer: the answer as the template writes it, and what ends its turn, wherever else that occurs."""
    tokenizer = family(template)
    end = {"glm": "", "alpaca": "", "harmony": "<|end|>", "system": "<|im_end|>"}.get(template)
    end = CONTROL.get(template, ("<|im_end|>",))[0] if end is None else end
    answers = [answer for answer in contents[1::2] if end or answer.strip()]
    if not answers:
        with pytest.raises(BadRow, match="answers anything"):
            said(tokenizer, turns(*contents))
        return
    spoken = said(tokenizer, turns(*contents))
    assert len(spoken) == len(answers)
    for text, answer, last in zip(spoken, answers, [False] * (len(answers) - 1) + [True], strict=True):
        text = text.removeprefix("<|channel|>final<|message|>")
        text = text.removesuffix("<|return|>" if last and template == "harmony" else end)
        assert text.strip() == answer.strip()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (lambda text: text[: len(text) // 2], "no tokenizer could be loaded"),
        (lambda _: "[]", "no tokenizer could be loaded"),
        (
            lambda text: json.dumps(json.loads(text) | {"model": {"type": "New"}}),
            r"tokenizer\.json: tokenizers \d.*newer",
        ),
        (
            lambda text: json.dumps(json.loads(text) | {"decoder": {"type": "New"}}),
            r"tokenizer\.json: tokenizers \d.*newer",
        ),
    ],
    ids=["torn", "no object", "a model of a later version", "a decoder of a later version"],
)
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, content: Any, named: str) -> None:
    verifier = tiny.make_verifier(tmp_path / "verifier")
    file = verifier / "tokenizer.json"
    file.write_text(content(file.read_text()))
    with pytest.raises(BadInput, match=named) as caught:
        HuggingFaceTokenizer(verifier)
    assert str(verifier) in str(caught.value)
