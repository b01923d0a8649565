"""What came of a job: attempts, files, another attempt, and its removal."""

import hashlib
import io
import json
import os
import shutil
from pathlib import Path

import httpx
import pytest

from client.http import ApiError


def ask(daemon, method, path, **headers):
    token = (daemon.state / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}", **headers}
    return httpx.request(method, daemon.client.url + path, headers=headers, trust_env=False)


def refused(call, *arguments, **named):
    with pytest.raises(ApiError) as error:
        call(*arguments, **named)
    return error.value.status, str(error.value)


def test_attempts_tell_how_each_process_life_ended(shared):
    daemon, planned = shared
    request = planned(
        ["print", "hello"], ["on_attempt", [1, "raise", "data"]], retry={"on": ["bad_data"], "backoff_s": 0}
    )
    [job] = daemon.client.submit(request)
    assert daemon.wait_ended(job["id"])["state"] == "succeeded"
    first, second = daemon.client.attempts(job["id"])
    assert (first["number"], first["state"], first["reason"]) == (1, "failed", "bad_data")
    assert "row 7 of shard 3" in first["cause"]
    assert (second["number"], second["state"], second["reason"]) == (2, "done", None)
    for one in (first, second):
        assert one["created_at"] <= one["started_at"] <= one["ended_at"]
        assert one["log_bytes"] >= len("hello\n")
        assert one["exit"]["rusage"]["user_s"] > 0
    assert (first["exit"]["code"], second["exit"]["code"]) == (3, 0)


def test_a_failed_job_gets_another_attempt_and_what_waited_for_it_too(shared):
    daemon, planned = shared
    first = planned(["on_attempt", [1, "raise", "data"]], name="first")
    first["params"]["output_dir"] = str(daemon.root / "again")
    last = planned(name="last", depends_on=["first"])
    first_id, last_id = (job["id"] for job in daemon.client.submit({"jobs": [first, last]}))
    assert daemon.wait_ended(last_id)["reason"] == "dependency_failed"
    status, text = refused(daemon.client.retry, last_id)
    assert status == 409
    assert first_id in text
    assert daemon.client.retry(first_id)["id"] == first_id
    job = daemon.wait_ended(first_id)
    assert (job["state"], job["reason"], job["attempt"]) == ("succeeded", None, 2)
    assert job["output_dir"] == str(daemon.root / "again")
    daemon.client.retry(last_id)
    assert daemon.wait_ended(last_id)["state"] == "succeeded"
    assert refused(daemon.client.retry, last_id)[0] == 409
    assert [one["state"] for one in daemon.client.attempts(first_id)] == ["failed", "done"]
    shutil.rmtree(daemon.root / "again")


def test_a_cancelled_job_goes_on_and_can_be_cancelled_anew(shared, tmp_path):
    daemon, planned = shared
    [job] = daemon.client.submit(planned(["until_file", str(tmp_path / "go")]))
    daemon.wait_state(job["id"], "running")
    assert refused(daemon.client.retry, job["id"])[0] == 409
    daemon.client.cancel(job["id"])
    assert daemon.wait_ended(job["id"])["state"] == "cancelled"
    daemon.client.retry(job["id"])
    running = daemon.wait_state(job["id"], "running")
    assert running["cancel_asked_at"] is None
    daemon.client.cancel(job["id"])
    assert daemon.wait_ended(job["id"])["state"] == "cancelled"
    daemon.client.retry(job["id"])
    daemon.wait_state(job["id"], "running")
    (tmp_path / "go").touch()
    assert daemon.wait_ended(job["id"])["attempt"] == 3


def test_a_cancel_before_any_attempt_is_taken_back(planned_daemon, planned, tmp_path):
    daemon = planned_daemon()
    daemon.client.submit(planned(["until_file", str(tmp_path / "go")]))
    [waits] = daemon.client.submit(planned())
    daemon.client.cancel(waits["id"])
    assert daemon.wait_ended(waits["id"])["state"] == "cancelled"
    assert daemon.client.retry(waits["id"])["attempts"] == 0
    (tmp_path / "go").touch()
    assert daemon.wait_ended(waits["id"])["state"] == "succeeded"


def test_a_retry_has_its_retries_anew_and_survives_a_rebuild(planned_daemon, planned, tmp_path):
    daemon = planned_daemon()
    [blocker] = daemon.client.submit(planned(["until_file", str(tmp_path / "go")], name="blocker", priority=5))
    daemon.wait_state(blocker["id"], "running")
    request = planned(["raise", "data"], retry={"max_retries": 1, "on": ["bad_data"], "backoff_s": 0})
    [job] = daemon.client.submit(request)
    (tmp_path / "go").touch()
    assert daemon.wait_ended(job["id"])["attempt"] == 2
    daemon.client.retry(job["id"])
    assert daemon.wait_ended(job["id"])["attempt"] == 4
    (tmp_path / "go").unlink()
    [blocker] = daemon.client.submit(planned(["until_file", str(tmp_path / "go")], name="blocker", priority=5))
    daemon.wait_state(blocker["id"], "running")
    daemon.client.retry(job["id"])
    assert daemon.stop() == 0
    assert os.spawnv(os.P_WAIT, daemon.command()[0], daemon.command("rebuild", "--state", str(daemon.state))) == 0
    daemon.start()
    queued = daemon.client.job(job["id"])
    assert (queued["state"], queued["reason"], queued["attempt"]) == ("queued", None, 4)
    (tmp_path / "go").touch()
    assert daemon.wait_ended(job["id"])["attempt"] == 6


def test_files_are_listed_and_fetched_whole_and_in_parts(shared, tmp_path):
    daemon, planned = shared
    request = planned(["print", "x"])
    output = daemon.root / "files"
    request["params"]["output_dir"] = str(output)
    [job] = daemon.client.submit(request)
    daemon.wait_ended(job["id"])
    data = os.urandom(3_000_000)
    (output / "sub dir").mkdir()
    (output / "sub dir" / "weights #1.bin").write_bytes(data)
    (output / "report.json").write_text('{"api_key": "abcdefgh12345678"}')
    (output / "shard_00000.safetensors").write_bytes(b"")
    (output / "link").symlink_to("/etc/passwd")
    os.mkfifo(output / "pipe")
    listed = daemon.client.artifacts(job["id"])
    by_path = {one["path"]: one for one in listed["artifacts"]}
    assert list(by_path) == ["link", "pipe", "report.json", "shard_00000.safetensors", "sub dir/weights #1.bin"]
    assert by_path["link"]["target"] == "/etc/passwd"
    assert [by_path[name]["role"] for name in ("link", "report.json", "shard_00000.safetensors")] == [
        "link", "report", "hidden_states"
    ]  # fmt: skip
    assert by_path["sub dir/weights #1.bin"]["bytes"] == len(data)
    assert listed["truncated"] is False

    fetched = io.BytesIO()
    assert daemon.client.download(job["id"], "sub dir/weights #1.bin", fetched) == len(data)
    assert hashlib.sha256(fetched.getvalue()).digest() == hashlib.sha256(data).digest()
    path = f"/jobs/{job['id']}/artifacts/sub%20dir/weights%20%231.bin"
    whole = ask(daemon, "GET", path)
    assert whole.headers["content-disposition"] == "attachment; filename*=UTF-8''weights%20%231.bin"
    assert whole.headers["x-content-type-options"] == "nosniff"
    head = ask(daemon, "HEAD", path)
    told = ("content-length", "etag", "accept-ranges", "content-disposition", "content-type", "last-modified")
    assert (head.status_code, head.content) == (200, b"")
    assert [head.headers[name] for name in told] == [whole.headers[name] for name in told]
    for asked, start, end in (
        ("bytes=10-19", 10, 20),
        ("bytes=2999990-", 2_999_990, 3_000_000),
        ("bytes=-5", -5, None),
    ):
        part = ask(daemon, "GET", path, Range=asked)
        assert (part.status_code, part.content) == (206, data[start:end])
        assert part.headers["content-range"].endswith("/3000000")
    assert ask(daemon, "GET", path, Range="bytes=0-1", **{"If-Range": whole.headers["etag"]}).status_code == 206
    assert ask(daemon, "GET", path, Range="bytes=0-1", **{"If-Range": '"another"'}).content == data
    beyond = ask(daemon, "GET", path, Range="bytes=3000000-")
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, "bytes */3000000")
    assert ask(daemon, "GET", path, Range="bytes=1-0").content == data
    # As it is: a digest of it must hold.
    assert ask(daemon, "GET", f"/jobs/{job['id']}/artifacts/report.json").text == '{"api_key": "abcdefgh12345678"}'
    held = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
    for _ in range(50):  # a directory is no file, and its descriptor is given back
        assert ask(daemon, "GET", f"/jobs/{job['id']}/artifacts/sub%20dir").status_code == 404
    assert len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) < held + 25
    for name in (
        "link",
        "pipe",
        "absent",
        "sub%20dir",
        "%2e%2e/daemon.log",
        "sub%20dir/..%2f..%2f..%2fx",
        "a%00b",
        "%2fetc%2fpasswd",
    ):
        assert ask(daemon, "GET", f"/jobs/{job['id']}/artifacts/{name}").status_code == 404, name


def test_a_directory_that_became_a_link_gives_nothing_away(shared):
    daemon, planned = shared
    request = planned()
    output = daemon.root / "swapped"
    request["params"]["output_dir"] = str(output)
    [job] = daemon.client.submit(request)
    daemon.wait_ended(job["id"])
    shutil.rmtree(output)
    output.symlink_to("/etc")
    assert ask(daemon, "GET", f"/jobs/{job['id']}/artifacts/passwd").status_code == 404
    status, text = refused(daemon.client.delete, job["id"], outputs=True)
    assert (status, "link" in text) == (409, True)
    told = daemon.client.delete(job["id"])
    assert daemon.client.delete(job["id"], confirm=told["confirm"])["deleted"]
    assert output.is_symlink()
    output.unlink()


def test_a_large_file_takes_little_memory(shared):
    daemon, planned = shared
    request = planned()
    output = daemon.root / "large"
    request["params"]["output_dir"] = str(output)
    [job] = daemon.client.submit(request)
    daemon.wait_ended(job["id"])
    with (output / "sparse").open("wb") as file:
        file.truncate(600_000_000)

    def most_resident():
        lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    class Sink:
        def write(self, data):
            return len(data)

    before = most_resident()
    assert daemon.client.download(job["id"], "sparse", Sink()) == 600_000_000
    assert most_resident() - before < 60_000_000
    (output / "sparse").unlink()


def test_deleting_tells_first_and_then_removes(shared, tmp_path):
    daemon, planned = shared
    request = planned(["print", "x"])
    output = daemon.root / "kept"
    request["params"]["output_dir"] = str(output)
    [job] = daemon.client.submit(request)
    daemon.wait_ended(job["id"])
    directory = daemon.state / "jobs" / job["id"]
    told = daemon.client.delete(job["id"])
    assert (told["deleted"], told["paths"], told["kept"]) == (False, [str(directory)], [str(output)])
    assert told["bytes"] > 0
    assert refused(daemon.client.delete, job["id"], confirm="0" * 16)[0] == 409
    # What was told without the outputs does not confirm their removal.
    assert refused(daemon.client.delete, job["id"], outputs=True, confirm=told["confirm"])[0] == 409
    done = daemon.client.delete(job["id"], confirm=told["confirm"])
    assert (done["deleted"], done["confirm"], done["bytes"]) == (True, None, told["bytes"])
    assert not directory.exists()
    assert output.exists()
    for call in (daemon.client.job, daemon.client.attempts, daemon.client.retry, daemon.client.delete):
        assert refused(call, job["id"])[0] == 404
    assert job["id"] not in [one["id"] for one in daemon.client.jobs()]
    assert list((daemon.state / "trash").iterdir()) == []

    shutil.rmtree(output)
    [job] = daemon.client.submit(request)
    daemon.wait_ended(job["id"])
    told = daemon.client.delete(job["id"], outputs=True)
    assert str(output) in told["paths"]
    daemon.client.delete(job["id"], outputs=True, confirm=told["confirm"])
    assert not output.exists()
    assert [one.name for one in daemon.root.iterdir() if "eyas-deleted" in one.name] == []


def test_what_is_needed_is_not_deleted(shared, tmp_path):
    daemon, planned = shared
    go = str(tmp_path / "go")
    maker, user = planned(name="maker"), planned(["until_file", go], name="user", depends_on=["maker"])
    maker["params"]["output_dir"] = str(daemon.root / "made")
    maker_id, user_id = (job["id"] for job in daemon.client.submit({"jobs": [maker, user]}))
    daemon.wait_state(user_id, "running")
    status, text = refused(daemon.client.delete, maker_id)
    assert status == 409
    assert user_id in text
    assert refused(daemon.client.delete, user_id)[0] == 409
    (tmp_path / "go").touch()
    daemon.wait_ended(user_id)
    (tmp_path / "go").unlink()
    reader = planned(name="reader")
    (daemon.root / "made" / "plan.json").write_text(json.dumps([["until_file", go]]))
    reader["params"]["checkpoint"] = str(daemon.root / "made")
    [reader] = daemon.client.submit(reader)
    assert "reads" in refused(daemon.client.delete, maker_id, outputs=True)[1]
    (tmp_path / "go").touch()
    daemon.wait_ended(reader["id"])
    # Another job's output inside goes first.
    inner = planned(name="inner")
    inner["params"]["output_dir"] = str(daemon.root / "made" / "inner")
    [inner] = daemon.client.submit(inner)
    daemon.wait_ended(inner["id"])
    status, text = refused(daemon.client.delete, maker_id, outputs=True)
    assert (status, inner["id"] in text) == (409, True)
    (daemon.root / "made" / ".eyas-job").write_text("somebody")
    told = daemon.client.delete(inner["id"], outputs=True)
    daemon.client.delete(inner["id"], outputs=True, confirm=told["confirm"])
    assert "not marked" in refused(daemon.client.delete, maker_id, outputs=True)[1]
    told = daemon.client.delete(maker_id)
    daemon.client.delete(maker_id, confirm=told["confirm"])
    assert daemon.client.job(user_id)["depends_on"] == []


def test_a_removal_that_was_cut_off_is_finished_by_the_next_daemon(planned_daemon, planned):
    daemon = planned_daemon()
    jobs = []
    for name in ("renamed", "told", "stays"):
        request = planned(name=name)
        request["params"]["output_dir"] = str(daemon.root / name)
        [job] = daemon.client.submit(request)
        daemon.wait_ended(job["id"])
        jobs.append(job["id"])
    renamed, told, stays = jobs
    assert daemon.stop() == 0
    # As a daemon leaves it that is killed right behind the rename, and before it.
    trash = daemon.state / "trash"
    trash.mkdir(exist_ok=True)
    for job_id, name in ((renamed, "renamed"), (told, "told")):
        order = {"outputs": str(daemon.root / name)}
        (daemon.state / "jobs" / job_id / "delete.json").write_text(json.dumps(order))
    (daemon.state / "jobs" / renamed).rename(trash / renamed)
    daemon.start()
    assert [job["id"] for job in daemon.client.jobs()] == [stays, told]
    assert list(trash.iterdir()) == []
    assert not (daemon.root / "renamed").exists()
    assert (daemon.root / "told").exists()
    assert daemon.client.artifacts(told)["artifacts"] == []


def test_a_token_that_may_only_look_fetches_and_removes_nothing(shared):
    daemon, planned = shared
    [job] = daemon.client.submit(planned(["raise", "data"]))
    daemon.wait_ended(job["id"])
    token = daemon.client.create_token("reader-of-ended", "read")["token"]
    headers = {"Authorization": f"Bearer {token}"}
    assert ask(daemon, "GET", f"/jobs/{job['id']}/artifacts", **headers).status_code == 200
    for method, path in (("DELETE", ""), ("POST", "/retry")):
        assert ask(daemon, method, f"/jobs/{job['id']}{path}", **headers).status_code == 403
