"""What is overwritten, what is not, and that text keeps its length and JSON stays JSON."""

import json
import logging

import pytest

from server.domain.redaction import Redactor
from server.settings import secret_values, unprotected_variables
from server.system.logs import LineFormatter

HF = "hf_" + "Ab3" * 11


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"loading with {HF} from the hub", HF[3:]),
        ("HF_TOKEN=abcdefghijkl", "abcdefghijkl"),
        ("password: hunter22", "hunter22"),
        ("{'api_key': 'sdfsdfsdf'}", "sdfsdfsdf"),
        ('{"password": "a \\" b", "n": 1}', 'a \\" b'),
        ('["train.py", "--hf-token", "abcdefgh"]', "abcdefgh"),
        ("train.py --token abcdefgh --epochs 3", "abcdefgh"),
        ("https://me:pa55@host/x", "me:pa55"),
        ("https://h/x?a=1&X-Amz-Signature=abcdef0123&b=2", "abcdef0123"),
        ("Authorization: Bearer abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI", "wJalrXUtnFEMI"),
        ("key AKIAIOSFODNN7EXAMPLE used", "IOSFODNN7EXAMPLE"),
        ("ghp_" + "a1" * 18, "a1" * 18),
    ],
)
def test_secrets_by_shape_and_key(text, secret):
    shown = Redactor().text(text)
    assert secret not in shown
    assert shown == text.replace(secret, "*" * len(secret))


@pytest.mark.parametrize(
    "text",
    [
        "eos_token='<|im_end|>' pad_token_id=151643 max_tokens=512000 num_key_value_heads: 8",
        "running; epoch 2 of 3, 512 of 768 steps (66 %), loss 5.29, 1490 tokens/s, about 27 s left",
        "send the header `Authorization: Bearer TOKEN`; the token is in the state directory",
        '{"tokens": 1234567, "supervised_tokens": 123456, "next_cursor": 7, "keys": ["fc.weight"]}',
        "the token is wrong, revoked or expired",
        "lm_head.weight: key not found in model.safetensors; special token: <|endoftext|>",
        "disk-1234567890123456789012345 task-abcdefghijklmnopqrstuvwxyz",
        "http://127.0.0.1:8765/jobs?limit=100&cursor=12345678",
    ],
)
def test_what_only_looks_like_one_stays(text):
    assert Redactor().text(text) == text


def test_known_values_in_every_writing():
    secret = 'Sé"c\\ret/Wert 1'
    redactor = Redactor([secret])
    for written in (
        secret, secret.lower(), json.dumps(secret), json.dumps(secret, ensure_ascii=False), repr(secret),
        "S%C3%A9%22c%5Cret%2FWert%201",
    ):  # fmt: skip
        shown = redactor.text(f"<{written}>")
        assert "ret" not in shown.lower()
        assert len(shown.encode()) == len(f"<{written}>".encode())
    assert Redactor(["short"]).text("short") == "short"
    assert Redactor(["-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG\n"]).text("x MIIEvQIBADANBgkqhkiG") == "x " + "*" * 20


def test_json_stays_json_whatever_the_value():
    body = json.dumps({"bytes": 12345678, "pin": "12345678", "loss": 1.5e-10, "cause": "true"}).encode()
    shown = json.loads(Redactor(["12345678"]).data(body))
    assert (shown["bytes"], shown["pin"]) == (11111111, "11111111")


def test_which_variables_are_secret(monkeypatch, tmp_path):
    for name, value in {
        "HF_TOKEN": "tok-value-1",
        "WANDB_API_KEY": "key-value-1",
        "DB_PASSWORD": "pass-value-1",
        "TOKENIZERS_PARALLELISM": "false-value",
        "MAX_TOKENS": "512000000",
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path),
        "HTTPS_PROXY": "http://me:proxy%2Fvalue@proxy:3128",
        "PLAIN": "plain-value",
        "ODD_ONE": "odd-value",
    }.items():
        monkeypatch.setenv(name, value)
    found = secret_values(("ODD_ONE",))
    expected = {"tok-value-1", "key-value-1", "pass-value-1", "proxy%2Fvalue", "proxy/value", "odd-value"}
    assert expected <= set(found)
    assert not {"false-value", "512000000", str(tmp_path), "plain-value"} & set(found)


def test_a_variable_that_cannot_be_protected_is_told(monkeypatch):
    monkeypatch.setenv("LONG_ONE", "long-enough")
    monkeypatch.setenv("SHORT_ONE", "short")
    assert unprotected_variables(("LONG_ONE", "SHORT_ONE", "NO_SUCH_ONE"), 8) == [
        "SHORT_ONE in EYAS_SECRET_VARIABLES is shorter than 8 characters",
        "NO_SUCH_ONE in EYAS_SECRET_VARIABLES is not set",
    ]


def test_a_log_line_is_one_line_without_secrets():
    formatter = LineFormatter(Redactor(["canary-value"]))
    record = logging.LogRecord(
        "x", logging.INFO, "f", 1, "job %s", ("a\n2026 ERROR forged \x1b[2J\u202e canary-value",), None
    )
    shown = formatter.format(record)
    assert shown.endswith("INFO job a\\n2026 ERROR forged \\x1b[2J\\u202e ************")
