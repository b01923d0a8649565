"""Logs as bytes: from anywhere, of any size, with anything in them, as they are written."""

import json
import os
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import httpx
import psutil
import pytest

from tests.cases import make_case


@pytest.fixture
def http(shared):
    daemon, _ = shared
    with httpx.Client(
        base_url=daemon.client.url, headers=daemon.client._http.headers, trust_env=False, timeout=60
    ) as http:
        yield http


@pytest.fixture
def logged(shared):
    """The path of the log of a job that has ended, holding these bytes."""

    def make(content=b""):
        daemon, planned = shared
        [stored] = daemon.client.submit(planned())
        daemon.wait_ended(stored["id"])
        (daemon.attempt(stored["id"]) / "output.log").write_bytes(content)
        return f"/jobs/{stored['id']}/log"

    return make


def read_all(http, path, limit, **asked):
    pieces, offset = [], 0
    while True:
        part = http.get(path, params={"offset": offset, "limit": limit, **asked})
        pieces.append(part.content)
        following = int(part.headers["x-next-offset"])
        if following == offset:
            assert part.headers["x-log-complete"] == "true"
            return b"".join(pieces)
        offset = following


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        (b"A\nB\nC\n", 2, b"B\nC\n"),
        (b"A\nB\nC", 2, b"B\nC"),
        (b"A\nB\nC", 3, b"A\nB\nC"),
        (b"A\nB\nC", 99, b"A\nB\nC"),
        (b"A\nB\nC", 10**15, b"A\nB\nC"),
        (b"A\nB\nC", 1, b"C"),
        (b"A\nB\nC", 0, b""),
        (b"", 5, b""),
        (b"only", 5, b"only"),
        (b"\n\n\n", 2, b"\n\n"),
        (b"x\n" * 100_000, 70_000, b"x\n" * 70_000),
        (b"a" * 200_000 + b"\n" + b"b" * 200_000 + b"\n", 1, b"b" * 200_000 + b"\n"),
    ],
)
def test_the_last_lines(http, logged, content, lines, expected):
    answer = http.get(logged(content), params={"tail": lines})
    assert answer.content == expected
    assert int(answer.headers["x-log-offset"]) == len(content) - len(expected)
    assert int(answer.headers["x-next-offset"]) == len(content)


def test_case_j03_without_a_last_newline(http, logged, tmp_path):
    directory = make_case("J03", tmp_path)
    for name in ("with_nl", "no_nl", "crash"):
        raw = (directory / f"{name}.log").read_bytes()
        path = logged(raw)
        assert http.get(path, params={"tail": 2}).text.split() == ["B", "C"]
        assert http.get(path, params={"tail": 2, "view": "clean"}).text.split() == ["B", "C"]
        assert http.get(path).content == raw
    for name in ("one", "empty", "newlines", "big_line"):
        raw = (directory / f"{name}.log").read_bytes()
        path = logged(raw)
        assert read_all(http, path, 1000) == read_all(http, path, 1000, view="clean") == raw
        last = raw.splitlines(keepends=True)[-1] if raw else b""
        assert http.get(path, params={"tail": 1}).content == last


@pytest.mark.parametrize("case", ["J01", "J02", "J05", "K04"])
def test_cases_j01_j02_j05_k04_raw_is_what_was_written_and_clean_is_for_a_person(http, logged, tmp_path, case):
    raw = (make_case(case, tmp_path) / "train.log").read_bytes()
    path = logged(raw)
    for size in (1, 1000, 1024, 4096, 65_536) if len(raw) < 3000 else (1000, 4096, 8192, 65_536):
        assert read_all(http, path, size) == raw
    answer = http.get(path, params={"view": "clean"})
    clean = read_all(http, path, 1000, view="clean")
    assert clean.startswith(answer.content)
    assert not set(clean) & {0x00, 0x07, 0x08, 0x0D, 0x1B, 0x7F}
    clean.decode()
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    if case == "J01":
        assert clean.count(b"Epoch 0:") == 2
        assert http.get(path, params={"tail": 1, "view": "clean"}).content == b"last update"
    if case == "K04":
        assert clean == raw


def test_case_j06_numbers_that_are_none_in_the_log_and_in_metrics(shared, http, tmp_path):
    daemon, planned = shared
    raw = (make_case("J06", tmp_path) / "metrics.jsonl").read_text()
    events = []
    for number, line in enumerate(raw.splitlines()):
        whole = line.startswith("{") and line.endswith("}")
        head = f'"seq": {number + 2}, "time": "2026-01-01T00:00:00Z", "boottime_s": 1, "type": "progress"'
        events.append(["raw", f"{{{head}, {line[1:]}" if whole else line])
    [stored] = daemon.client.submit(planned(["print", raw], *events))
    job = daemon.wait_ended(stored["id"])
    assert raw.encode() in http.get(f"/jobs/{job['id']}/log").content
    for path in ("", "/events", "/metrics", "/log?view=clean", "/events/stream", "/log/stream"):
        answer = http.get(f"/jobs/{job['id']}{path}")
        assert answer.status_code == 200, path
        assert not {"NaN", "Infinity"} & set(answer.text.replace('\\"', " ").split()) or path.startswith("/log")
    assert any(warning["code"] == "broken_event" for warning in job["warnings"])


def test_a_number_too_large_for_a_float_is_no_point(shared, http):
    daemon, planned = shared
    head = '"time": "2026-01-01T00:00:00Z", "boottime_s": 1, "type": "progress", "step": 1, "epoch": 0, "epochs": 1'
    losses = ["1.5", "9" * 400, "1e400", "-1e400", "2.5"]
    lines = [f'{{"seq": {place}, {head}, "loss": {loss}}}' for place, loss in enumerate(losses, 2)]
    [stored] = daemon.client.submit(planned(*(["raw", line] for line in lines)))
    daemon.wait_ended(stored["id"])
    points = http.get(f"/jobs/{stored['id']}/metrics?names=train.loss").json()["series"]["train.loss"]["points"]
    assert [value for _, value in points] == [1.5, 2.5]


@pytest.mark.parametrize(
    ("header", "status", "content", "told"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=7-99", 206, b"789", "bytes 7-9/10"),
        ("bytes=7-18446744073709551615", 206, b"789", "bytes 7-9/10"),
        ("bytes=-4", 206, b"6789", "bytes 6-9/10"),
        ("bytes=-99", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=-0", 416, None, "bytes */10"),
        ("bytes=5-2", 200, b"0123456789", None),
        ("bytes=0-1,3-4", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
    ],
)
def test_ranges(http, logged, header, status, content, told):
    path = logged(b"0123456789")
    answer = http.get(path, headers={"Range": header})
    assert (answer.status_code, answer.headers.get("content-range")) == (status, told)
    if content is None:
        assert answer.json()["type"] == "urn:eyas:problem:range-not-satisfiable"
    else:
        assert answer.content == content
        assert int(answer.headers["content-length"]) == len(content)
    assert http.get(path, headers={"Range": header, "If-Range": '"x"'}).status_code == 200


def test_a_head_has_no_body(http, logged):
    path = logged(b"0123456789")
    for more in ("", "?follow=true", "?tail=2", "?wait=30"):
        answer = http.head(path + more)
        assert (answer.status_code, answer.content, answer.headers["x-log-size"]) == (200, b"", "10")
    assert http.head(path).headers["accept-ranges"] == "bytes"
    assert http.head(path, headers={"Range": "bytes=2-4"}).headers["content-length"] == "3"


def test_a_log_that_is_resumed_by_curl_is_whole(shared, http, logged, tmp_path):
    """`curl -C -` asks for a Range from where its file ends."""
    daemon, _ = shared
    raw = os.urandom(3_000_000)
    path = logged(raw)
    (tmp_path / "got").write_bytes(raw[:1_234_567])
    command = [
        "curl",
        "-sS",
        "-C",
        "-",
        "-o",
        str(tmp_path / "got"),
        "-H",
        f"Authorization: {http.headers['authorization']}",
    ]
    subprocess.run([*command, daemon.client.url + path], check=True, timeout=60)
    assert (tmp_path / "got").read_bytes() == raw


def resident_mb(pid):
    return psutil.Process(pid).memory_info().rss / 1e6


def test_fault_17_ten_gigabytes_and_their_end(shared, http, logged):
    """Sparse, so that it costs no disk. Whatever is asked, it is answered at once, in little memory."""
    daemon, _ = shared
    path = logged()
    log = daemon.attempt(path.split("/")[2]) / "output.log"
    os.truncate(log, 10 << 30)
    with log.open("ab") as file:
        file.write("".join(f"\nline {n}" for n in range(50)).encode())
    size = log.stat().st_size
    before = resident_mb(daemon.pid)
    begin = time.monotonic()
    assert http.get(path, params={"tail": 2}).content == b"line 48\nline 49"
    for view in ("raw", "clean"):
        longest = http.get(path, params={"tail": 60, "view": view})
        assert longest.content.endswith(b"line 49")
        assert int(longest.headers["x-log-offset"]) == size - (1 << 20)
        assert http.get(path, params={"offset": 5 << 30, "view": view}).headers["x-next-offset"] == str(
            (5 << 30) + 65_536
        )
    assert http.get(path, headers={"Range": "bytes=-7"}).content == b"line 49"
    with http.stream("GET", path, params={"follow": "true", "tail": 1}) as answer:
        assert answer.read() == b"line 49"
    assert time.monotonic() - begin < 10
    assert resident_mb(daemon.pid) - before < 40
    log.unlink()


def test_fault_16_a_line_of_50_mb_is_read_in_pieces(shared, http, logged):
    daemon, _ = shared
    path = logged(b"begin\n" + b"x" * 50_000_000 + b"\nthe end")
    before = resident_mb(daemon.pid)
    assert http.get(path, params={"tail": 1}).content == b"the end"
    assert len(http.get(path, params={"tail": 2}).content) == 1 << 20
    answer = http.get(path, params={"offset": 0, "limit": 1 << 20, "view": "clean"})
    assert answer.content == b"begin\n"  # whole lines while there are any
    answer = http.get(path, params={"offset": 6, "limit": 1 << 20, "view": "clean"})
    assert answer.content == b"x" * (1 << 18)
    assert answer.headers["x-next-offset"] == str(6 + (1 << 18))
    assert http.get(path, params={"offset": 6, "limit": 3_000_000}).content == b"x" * 3_000_000
    assert resident_mb(daemon.pid) - before < 40


def test_a_log_is_followed_as_it_is_written(shared, http, wait_for, tmp_path):
    daemon, planned = shared
    plan = []
    for number in range(5):
        plan += [["print", f"line {number} ✓"], ["until_file", str(tmp_path / f"go-{number}")]]
    [stored] = daemon.client.submit(planned(*plan))
    path = f"/jobs/{stored['id']}/log"
    got = b""
    waited = http.get(path, params={"wait": "30"})  # a queued job has none yet
    assert waited.content.startswith(b"==")
    with http.stream("GET", path, params={"follow": "true"}) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        pieces = answer.iter_raw()
        for number in range(5):
            while f"line {number} ✓\n".encode() not in got:
                got += next(pieces)
            offset = len(got)
            if number < 4:
                assert http.get(path, params={"offset": offset, "wait": "0.1"}).content == b""
            (tmp_path / f"go-{number}").touch()
        got += b"".join(pieces)
    assert got == (daemon.attempt(stored["id"]) / "output.log").read_bytes()
    assert b"".join(daemon.client.follow_log(stored["id"])) == got
    assert b"".join(daemon.client.follow_log(stored["id"], offset=7)) == got[7:]
    command = [*daemon.command("log", stored["id"], "-f", "--tail", "1"), "--state", str(daemon.state)]
    assert subprocess.run(command, capture_output=True, timeout=60, check=True).stdout == "line 4 ✓\n".encode()
    command = [*daemon.command("log", stored["id"], "--clean"), "--state", str(daemon.state)]
    assert subprocess.run(command, capture_output=True, timeout=60, check=True).stdout == got


def test_what_follows_is_seen_over_all_attempts(planned_daemon, planned):
    daemon = planned_daemon()
    request = planned(
        ["print", "first words"],
        ["on_attempt", [1, "vanish", None]],
        ["print", "second words"],
        retry={"max_retries": 1, "backoff_s": 0.2},
    )
    [stored] = daemon.client.submit(request)
    followed = b"".join(daemon.client.follow_log(stored["id"]))
    logs = [(daemon.attempt(stored["id"], number) / "output.log").read_bytes() for number in (1, 2)]
    assert followed == b"".join(logs)
    assert followed.count(b"first words") == 2
    assert daemon.client.log(stored["id"], attempt=1).complete
    seqs = [event["seq"] for event in daemon.client.stream_events(stored["id"])]
    assert seqs == list(range(1, len(seqs) + 1))


def test_half_a_secret_at_the_end_of_a_growing_log_is_not_shown(new_daemon, tmp_path, monkeypatch):
    """A word that is being written waits a moment; and colours within a secret hide it from nobody."""
    secret = "canary-3f9d2c7e51ab"
    monkeypatch.setenv("EXAMPLE_API_KEY", secret)
    script = tmp_path / "root" / "script.sh"
    daemon = new_daemon(EYAS_EXTERNAL_PROGRAMS='["/bin/sh"]')
    script.write_text(
        f"for n in 1 2 3 4 5 6 7 8; do\n"
        f"  printf 'key {secret[:9]}'; sleep 0.02; printf '{secret[9:]} '; sleep 0.05\n"
        "done\n"
        f"printf '\\n{secret[:7]}\\033[0m{secret[7:]}\\n'\n"
    )
    [stored] = daemon.client.submit({"stage": "external", "params": {"argv": ["/bin/sh", str(script)]}})
    with daemon.client._http.stream("GET", f"/jobs/{stored['id']}/log?follow=true", timeout=60) as answer:
        raw = answer.read()
    daemon.wait_ended(stored["id"])
    file = (daemon.attempt(stored["id"]) / "output.log").read_bytes()
    assert raw == file.replace(secret.encode(), b"*" * len(secret))
    assert raw.count(b"*" * len(secret)) == 8
    clean = b"".join(daemon.client.follow_log(stored["id"], view="clean"))
    assert clean.count(b"*" * len(secret)) == 9
    assert secret[:9].encode() not in clean


def test_case_k01_names_that_lead_nowhere(http, tmp_path):
    for name in json.loads((make_case("K01", tmp_path) / "names.json").read_text()):
        for form in (name, quote(name, safe="")):
            if not form or any(sign in form for sign in "\x00\n"):
                continue
            for path in ("log", "log/stream", "log?follow=true", "events/stream", "log?tail=5"):
                answer = http.get(f"/jobs/{form}/{path}")
                assert 400 <= answer.status_code < 500, (form, path)
                assert b"must not be readable" not in answer.content


def test_a_link_in_place_of_a_log_is_followed_by_nobody(shared, http, logged, tmp_path):
    daemon, _ = shared
    (tmp_path / "secret").write_text("must not be readable\n")
    path = logged()
    log = daemon.attempt(path.split("/")[2]) / "output.log"
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    for asked in ({}, {"tail": 3}, {"wait": "3"}, {"view": "clean"}):
        assert http.get(path, params=asked).status_code == 409
    assert http.get(path, headers={"Range": "bytes=0-5"}).status_code == 409
    for more in ("?follow=true", "/stream"):
        assert http.get(path + more).status_code == 409
    assert Path(log).is_symlink()
