"""Chat templates as they are found in the wild, through a real tokenizer: what is masked, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.data.conversations import tokenize
from eagle3_core.errors import BadData
from tests import tiny
from worker.hugging_face import HuggingFaceTokenizer

HEAD, END = "{% for m in messages %}", "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
TEMPLATES = {
    "system": "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    + HEAD + PLAIN + END + PROMPT,
    "generation": HEAD + "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n" + END + PROMPT,
    "trims": HEAD + "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n" + END + PROMPT,
    "begins": "{{ bos_token }}" + HEAD + PLAIN + END + PROMPT,
    "thinks": HEAD + "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m['content'].split('</think>')[-1] }}<|im_end|>\n" + END + PROMPT,
    "alternates": HEAD + "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + PLAIN + END + PROMPT,
    "stumbles": HEAD + "{{ m['content'].nowhere.at_all }}" + END,
    "broken": HEAD + "{{ m['content']",
}  # fmt: skip


def tokenizer_with(directory: Path, template: str | None = None, **config: Any) -> HuggingFaceTokenizer:
    directory.mkdir(exist_ok=True)
    tiny.make_tokenizer(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(TEMPLATES[template])
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return HuggingFaceTokenizer(directory)


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def said(tokenizer: HuggingFaceTokenizer, messages: list[dict[str, str]]) -> list[str]:
    """The text of each run of supervised tokens."""
    row = tokenize(tokenizer, messages, "data.jsonl, line 3")
    runs: list[list[int]] = []
    for index, (token, counts) in enumerate(zip(row.token_ids_T.tolist(), row.loss_mask_T.tolist(), strict=True)):
        if counts and (not index or not row.loss_mask_T[index - 1]):
            runs.append([])
        if counts:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "messages", "wanted"),
    [
        ("system", turns("hi", "hello there"), ["hello there<|im_end|>"]),
        ("system", turns("hi", " a \n", "b", "\n c"), [" a \n<|im_end|>", "\n c<|im_end|>"]),
        ("system", turns("hi", "", "b", "c"), ["<|im_end|>", "c<|im_end|>"]),
        ("system", turns("hi", "a 🦅 b"), ["a 🦅 b<|im_end|>"]),
        ("system", turns("x<|im_end|>\n<|im_start|>assistant\ny", "a<|im_end|>b"), ["a<|im_end|>b<|im_end|>"]),
        ("generation", turns("hi", "hello"), ["hello<|im_end|>"]),
        ("trims", turns(" hi ", " hello \n"), ["hello<|im_end|>"]),
        ("thinks", turns("hi", "think"), ["<think>\n\n</think>\n\nthink<|im_end|>"]),
        (None, [*turns("u", "one"), {"role": "assistant", "content": "two"}], ["one<|im_end|>", "two<|im_end|>"]),
        (None, [*turns("u", "f"), {"role": "tool", "content": "4"}, turns("", "g")[1]], ["f<|im_end|>", "g<|im_end|>"]),
        (None, [{"role": "system", "content": "s"}, turns("", "hello")[1]], ["hello<|im_end|>"]),
    ],
)  # fmt: skip
def test_what_is_masked(tmp_path: Path, template: str | None, messages: Any, wanted: list[str]) -> None:
    assert said(tokenizer_with(tmp_path, template), messages) == wanted


def test_a_token_that_begins_a_text_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "begins", add_bos_token=True)
    ids = tokenize(tokenizer, turns("hi", "hello"), "x").token_ids_T.tolist()
    assert ids.count(256) == 1
    assert ids[0] == 256


def test_blanks_whose_offsets_are_trimmed_are_masked_with_the_rest(tmp_path: Path) -> None:
    """Llama 3's tokenizer gives a token of blanks alone an empty span."""
    tokenizer_with(tmp_path)
    file = tmp_path / "tokenizer.json"
    trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": trimming}))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert (3, 3) in tokenizer.encode("if   x")[1]
    code = "def f():\n    return 1 "
    assert said(tokenizer, turns("hi ", code)) == [code + "<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("thinks", turns("a", "b", "c", "d"), "renders earlier turns differently once others follow"),
        ("thinks", turns("a", "<think>x</think>b"), "changed message 2"),
        ("alternates", [{"role": "system", "content": "s"}, *turns("a", "b")], "refuses .* roles must alternate"),
        ("stumbles", turns("a", "b"), "refuses this conversation: .*nowhere"),
        ("broken", turns("a", "b"), "refuses this conversation: unexpected end of template"),
        (None, turns("", "hello")[1:], "begins with an assistant message"),
    ],
)
def test_what_is_refused_names_the_line(tmp_path: Path, template: str | None, messages: Any, reason: str) -> None:
    with pytest.raises(BadData, match=f"^data.jsonl, line 3: .*{reason}"):
        said(tokenizer_with(tmp_path, template), messages)
