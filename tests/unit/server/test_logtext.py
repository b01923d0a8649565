"""A log for a person: progress bars, colours, control characters, and pieces that are cut anywhere."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.domain.logtext import clean, whole_characters
from tests.cases import make_case

PARTS = st.sampled_from(
    [b"a", b"word ", "é".encode(), "中".encode(), "😀".encode(), b"\r", b"\r\n", b"\n", b"\b", b"\x1b[32m", b"\x1b[0m",
     b"\x1b]0;title\x07", b"\x1b]8;;http://x/\x1b\\", b"\x1b", b"\x00", b"\xff", b"\xe4\xb8"]
)  # fmt: skip


def whole(data):
    text, used = clean(data)
    assert used == len(data)
    return text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", b""),
        (b"a\nb", b"a\nb"),
        (b"\n\n\n", b"\n\n\n"),
        (b"a\r\nb\r\n", b"a\nb\n"),
        (b"0%\r50%\r100%\n", b"100%\n"),
        (b"\r0%\r50%\r", b"50%"),
        (b"one\r\r\n", b"one\n"),
        (b"abc\b\b\bxyz\n", b"xyz\n"),
        ("é\b/\n".encode(), b"/\n"),
        (b"\b\ba\n", b"a\n"),
        (b"\x1b[1;32mINFO\x1b[0m ok\n", b"INFO ok\n"),
        (b"\x1b]0;title\x07after\n", b"after\n"),
        (b"\x1b]8;;http://x/\x1b\\link\x1b]8;;\x1b\\\n", b"link\n"),
        (b"\x1b(B\x1b=\x1bMx\n", b"x\n"),
        (b"\x00\x01\x7f ctrl\ttab\n", b" ctrl\ttab\n"),
        ("\u009b31mred".encode(), b"31mred"),
        (b"bad \xff byte \xe4\xb8", "bad \ufffd byte \ufffd".encode()),
    ],
)
def test_what_a_person_would_have_seen(raw, text):
    assert whole(raw) == text


@pytest.mark.parametrize(
    "flood",
    [b"\0", b"\x1b]0;", b"\x1b[", b"\r", b"\n", b"a\b", b"b\b\n", b"\r\b", b"\x1b[32mx", b"\xc2\x9ba", b"\r 9%|#"],
)
def test_a_flood_takes_memory_and_time_by_its_bytes_and_not_by_its_marks(flood):
    data = flood * ((2 << 20) // len(flood))
    tracemalloc.start()
    _, used = clean(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used == len(data)
    assert peak < 5 * len(data)


def test_no_control_function_is_put_together_from_what_is_left():
    assert whole(b"\xc2\x00\x9b31m \xc2\x07\x9b \x1b\x00[31mred") == b"31m  [31mred"


def test_a_line_that_is_being_drawn_is_shown_as_it_stands_and_what_is_drawn_later_is_another_line():
    first, used = clean(b"start\n 10%\r 20%", last=False)
    assert (first, used) == (b"start\n 20%", 15)
    more, used = clean(b"\r 30%\r 40%", before=b"start\n 10%\r 20%", last=False)
    assert (more, used) == (b"\n 40%", 10)
    rest, _ = clean(b"\r\ndone\n", before=b"start\n 10%\r 20%\r 30%\r 40%")
    assert rest == b"\ndone\n"
    assert clean(b" more\n", before=b"half a line")[0] == b" more\n"


def test_a_bar_that_was_cut_behind_its_carriage_return():
    assert clean(b" 20%\n", before=b"x\n 10%\r") == (b"\n 20%\n", 5)
    assert clean(b" 20%\n", before=b"x\n\r") == (b" 20%\n", 5)
    assert clean(b"\nnext\n", before=b"x\n 10%\r") == (b"\nnext\n", 6)


@pytest.mark.parametrize(
    "torn", [b"\x1b", b"\x1b[", b"\x1b[38;5;", b"\x1b]0;ti", b"\x1b]0;ti\x1b", b"\xc3", b"\xf0\x9f\x98"]
)
def test_what_is_torn_waits_for_its_rest_and_is_given_up_when_none_comes(torn):
    assert clean(b"text" + torn, last=False) == (b"text", 4)
    assert clean(b"text" + torn, last=True)[1] == 4 + len(torn)


def test_a_control_string_without_an_end_is_text():
    text, used = clean(b"\x1b]" + b"x" * 10_000, last=False)
    assert used == 10_002
    assert text.endswith(b"xxx")


@given(st.lists(PARTS, max_size=60))
def test_pieces_of_whole_lines_give_the_same_as_all_at_once(parts):
    data = b"".join(parts)
    window = max(map(len, data.splitlines(keepends=True)), default=0) + max(map(len, data.split(b"\n"))) + 2
    place, pieces = 0, []
    while place < len(data):
        at_end = place + window >= len(data)
        text, used = clean(data[place : place + window], data[max(0, place - 4096) : place], at_end=at_end)
        assert used > 0
        pieces.append(text)
        place += used
    assert b"".join(pieces) == whole(data)


@given(st.lists(PARTS, max_size=60), st.integers(8, 20))
def test_pieces_of_any_size_end_and_hold_no_control(parts, window):
    data = b"".join(parts)
    place, pieces = 0, []
    while place < len(data):
        at_end = place + window >= len(data)
        text, used = clean(data[place : place + window], data[max(0, place - 4096) : place], at_end=at_end)
        assert used > 0
        pieces.append(text)
        place += used
    text = b"".join(pieces).decode()
    assert not any(sign < " " and sign not in "\n\t" for sign in text)


@given(st.text(max_size=40), st.integers(0, 200))
def test_characters_are_cut_whole(text, cut):
    data = text.encode()[:cut]
    data[: whole_characters(data)].decode()


def test_bytes_that_are_no_text_are_not_waited_for():
    assert whole_characters(b"a\xff") == 2
    assert whole_characters(b"a\x80\x80") == 3
    assert whole_characters(b"\xe4\xb8\xad") == 3


def test_case_j01_progress_bars(tmp_path):
    raw = (make_case("J01", tmp_path) / "train.log").read_bytes()
    assert whole(raw).decode().split("\n") == [
        "start",
        "Epoch 0:  50%|##########| 200/400 [loss=3.000]".replace("##########", "#####     "),
        "WARNING: saved checkpoint 1",
        "Epoch 0:  99%|######### | 399/400 [loss=1.010]",
        "windows line",
        "last update",
    ]


def test_case_j02_characters_at_the_edges_of_buffers(tmp_path):
    raw = (make_case("J02", tmp_path) / "train.log").read_bytes()
    assert whole(raw) == raw.decode(errors="replace").encode()
    for size in (1024, 4096, 8192, 65536):
        cut = whole_characters(raw[:size])
        assert raw[:cut].decode(errors="replace").count("\ufffd") <= raw[:cut].count(b"\xff")


def test_case_j05_terminal_codes(tmp_path):
    raw = (make_case("J05", tmp_path) / "train.log").read_bytes()
    expected = ["INFO ok", "cleared", "hid", "after", "link", "xyz", " ctrl", "up", ""]
    assert whole(raw).decode().split("\n") == expected
    assert clean(raw, last=False)[1] == len(raw) - len(b"\x1b[38;5;")
