"""Names, messages and logs with markup, colours and control characters are text wherever they are shown."""

import json
import subprocess

import httpx

from tests.cases import make_case

HOSTILE = "<svg onload=document.title='pwn'>\u202e\x9b31m&lt;\"'</script><img src=x onerror=alert(1)>"


def everything(daemon, job_id):
    """Each answer about a job, and the page, as a browser with a session gets them."""
    link = daemon.client.login_link()
    with httpx.Client(base_url=daemon.client.url, trust_env=False, timeout=60) as browser:
        assert browser.get(link).status_code == 303
        paths = ["/", "/page.js", "/page.css", "/jobs", "/audit", "/tokens", f"/jobs/{HOSTILE}"]
        return [browser.get(path) for path in [*paths, *(f"/jobs/{job_id}{rest}" for rest in ("", "/events", "/log"))]]


def shows_only_text(daemon, job_id):
    """No answer that a browser takes for HTML holds any of it, and none may be taken for another type."""
    for answer in everything(daemon, job_id):
        kind = answer.headers["content-type"].partition(";")[0]
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert kind in {
            "text/html", "text/javascript", "text/css", "application/json", "application/problem+json", "text/plain"
        }  # fmt: skip
        if kind == "text/html":
            assert "pwn" not in answer.text
            assert "<script>" not in answer.text  # only files of the daemon's own
            assert " on" not in answer.text.replace(" one", "").replace(" only", "")
            assert "style=" not in answer.text


def test_fault_23_markup_and_control_characters_are_text(shared):
    daemon, planned = shared
    said = "\x1b[2J\x1b]0;pwn\x07" + HOSTILE
    request = planned(
        ["print", said + "\n"],
        ["event", {"type": "warning", "code": "<b>", "message": said}],
        ["fail", said],
        name=HOSTILE.replace("\x9b", ""),
    )
    [one] = daemon.client.submit(request)
    job = daemon.wait_ended(one["id"])
    assert job["name"] == request["name"]
    assert job["warnings"][0]["message"] == said  # as it is, in JSON
    shows_only_text(daemon, one["id"])
    for command in ("jobs", f"job {one['id']}"):
        run = subprocess.run(
            [*daemon.command(*command.split()), "--state", str(daemon.state)],
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert "onload" in run.stdout.decode()
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(run.stdout.decode())


def test_case_k04_markup_in_name_and_log(shared, tmp_path):
    daemon, planned = shared
    case = make_case("K04", tmp_path)
    text = (case / "train.log").read_text()
    [one] = daemon.client.submit(planned(["print", text], name=json.loads((case / "job.json").read_text())["name"]))
    daemon.wait_ended(one["id"])
    shows_only_text(daemon, one["id"])
    assert text.encode() in daemon.client.log(one["id"]).data
