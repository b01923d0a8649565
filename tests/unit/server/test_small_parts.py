"""Ids, settings, host names, login codes, paths: small parts with sharp edges."""

import errno
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from alembic import command
from pydantic import ValidationError

from eagle3_core.contract.jobdir import JobDir
from eagle3_core.contract.locks import is_held
from server.api.access import host_name
from server.api.pages import WEB
from server.app import _listen, is_loopback, serve
from server.db.engine import Database
from server.db.migrate import configuration, upgrade
from server.db.queries import incarnation, jobs
from server.domain.ids import is_job_id, new_job_id
from server.domain.marks import Marks
from server.errors import StartupError
from server.services import auth
from server.services.auth import Gate, read_or_make_token
from server.services.observer import last_words
from server.services.orders import order_stop
from server.services.runtime import Runtime
from server.settings import Settings, faults_of, missing_paths, unknown_variables, worker_environment
from server.system import clock, locks


def test_job_ids():
    assert len({new_job_id() for _ in range(1000)}) == 1000
    assert all(is_job_id(new_job_id()) for _ in range(1000))
    for bad in ("", ".", "..", "a/b", "a\\b", "-a", "a b", "a\n", "é", "x" * 65):
        assert not is_job_id(bad)


@pytest.mark.parametrize(
    ("host", "name"),
    [("localhost:8765", "localhost"), ("[::1]:80", "::1"), ("LOCALHOST", "localhost"), ("", ""), ("a.b:c:d", "a.b")],
)
def test_host_names(host, name):
    assert host_name(host) == name


def test_loopback():
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "gpu1")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_answers_are_not_held_back_by_the_kernel():
    """asyncio sets TCP_NODELAY only where the protocol is named; without it each answer takes 40 ms more."""
    with _listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
        with pytest.raises(StartupError, match="cannot listen"):
            _listen("127.0.0.1", listener.getsockname()[1])


def test_the_page_shows_data_as_text_only():
    script = (WEB / "page.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http://", "https://"):
        assert word not in script


def test_settings_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EYAS_STATE", str(tmp_path / "s"))
    monkeypatch.setenv("EYAS_ROOTS", f'["{tmp_path}"]')
    monkeypatch.setenv("EYAS_MAX_RUNING", "2")
    monkeypatch.setenv("EYAS_GPUS", '[0, "GPU-a"]')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = Settings()
    assert settings.gpus == ("0", "GPU-a")
    assert settings.all_roots == (tmp_path / "s", tmp_path)
    assert unknown_variables() == ["EYAS_MAX_RUNING is not a setting; did you mean EYAS_MAX_RUNNING?"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "CUDA_VISIBLE_DEVICES does not restrict the jobs; EYAS_GPUS does" in unknown_variables()
    environment = worker_environment("j1", 7, None, {"CUDA_VISIBLE_DEVICES": "GPU-b", "EYAS_JOB_ID": "no"})
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert {name: value for name, value in environment.items() if name.startswith("EYAS_")} == {
        "EYAS_JOB_ID": "j1",
        "EYAS_LOCK_FD": "7",
    }


def test_settings_that_cannot_be_used_are_told_with_what_to_write(monkeypatch, tmp_path):
    monkeypatch.setenv("EYAS_ROOTS", "/data")
    with pytest.raises(ValidationError) as no_list:
        Settings.model_validate({"state": tmp_path})
    assert faults_of(no_list.value) == [
        """EYAS_ROOTS cannot be used: write a JSON list, such as EYAS_ROOTS='["…", "…"]'"""
    ]
    monkeypatch.delenv("EYAS_ROOTS")
    monkeypatch.setenv("EYAS_GPUS", "0,1")
    monkeypatch.setenv("EYAS_PORT", "none")
    with pytest.raises(ValidationError) as two:
        Settings.model_validate({"state": tmp_path})
    port, gpus = faults_of(two.value)
    assert port.startswith("EYAS_PORT cannot be used: Input should be a valid integer")
    assert gpus.startswith("EYAS_GPUS cannot be used: write a JSON list")
    settings = Settings.model_construct(roots=(tmp_path, tmp_path / "data"), worker_python=tmp_path)
    assert missing_paths(settings) == [f"the root {tmp_path}/data does not exist"]
    settings = Settings.model_construct(roots=(), worker_python=tmp_path / "python")
    assert missing_paths(settings) == [f"EYAS_WORKER_PYTHON {tmp_path}/python is no program: no job can start"]


def test_the_token_is_made_once_and_private(tmp_path):
    path = tmp_path / "token"
    token = read_or_make_token(path)
    assert len(token) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert read_or_make_token(path) == token
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("")
    with pytest.raises(StartupError):
        read_or_make_token(path)


def test_codes_and_sessions_end(tmp_path, monkeypatch):
    database = Database(tmp_path / "eyas.db")
    upgrade(database.engine)
    runtime = Runtime(Settings(state=tmp_path), database)
    gate = Gate(runtime, "token")
    code, late = gate.new_code(), gate.new_code()
    cookie = gate.redeem(code)
    assert cookie is not None
    assert gate.redeem(code) is None
    assert gate.caller_of_cookie(cookie)
    assert Gate(runtime, "token").caller_of_cookie(cookie)
    assert not Gate(runtime, "another token").caller_of_cookie(cookie)
    assert cookie.encode() not in (tmp_path / "eyas.db").read_bytes() + (tmp_path / "eyas.db-wal").read_bytes()
    now = clock.utc_now()
    monkeypatch.setattr(auth.clock, "utc_now", lambda: now + timedelta(minutes=11))
    assert gate.redeem(late) is None
    assert gate.caller_of_cookie(cookie)
    monkeypatch.setattr(auth.clock, "utc_now", lambda: now + timedelta(hours=13))
    assert not gate.caller_of_cookie(cookie)
    assert not Gate(runtime, "token").caller_of_cookie(cookie)
    database.close()


def test_locks(tmp_path):
    path = tmp_path / "lock"
    assert not is_held(path)
    held = locks.take(path)
    assert held is not None
    assert is_held(path)
    assert locks.take(path) is None
    locks.release(held)
    assert not is_held(path)


def test_last_words(tmp_path):
    log = tmp_path / "output.log"
    assert last_words(log) is None
    log.write_bytes(b"first\n\x1b[31mred \xff end\x1b[0m\r\n \n\x00\n")
    assert last_words(log) == "red \ufffd end"
    log.write_bytes(b"x" * 100_000)
    assert last_words(log) == "x" * 300


def test_a_state_directory_that_cannot_be_used_is_said_in_a_line(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "eyas.db").write_bytes(b"garbage" * 1000)
    for name, said in (("file", "File exists"), ("damaged", "not a database")):
        with pytest.raises(StartupError, match=said):
            serve(Settings(state=tmp_path / name, port=0))
    (tmp_path / "token").write_bytes(b"\xff" * 40)
    with pytest.raises(StartupError, match="holds no token"):
        read_or_make_token(tmp_path / "token")


def test_on_a_full_disk_an_empty_file_is_the_order_to_stop(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    job = JobDir(tmp_path / "j")
    monkeypatch.setattr("server.services.orders.write_json", full)
    order_stop(job, 3.0)
    assert job.cancel.read_bytes() == b""


def test_the_daemon_takes_more_descriptors_and_gives_its_jobs_what_it_began_with():
    """Programs that use select() fail on a descriptor over 1023."""
    code = (
        "import resource, subprocess, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "from server.system.descriptors import give_first_limit, raise_limit\n"
        "most = raise_limit()\n"
        "assert most == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        "give_first_limit(child.pid)\n"
        "print(resource.prlimit(child.pid, resource.RLIMIT_NOFILE)[0])\n"
        "child.communicate()\n"
        "give_first_limit(child.pid)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.stdout.strip(), run.stderr) == ("300", "")


def test_a_database_of_before_gets_a_name_and_all_its_news_are_of_now(tmp_path):
    database = Database(tmp_path / "eyas.db")
    with database.engine.connect() as connection:
        config = configuration()
        config.attributes["connection"] = connection
        command.upgrade(config, "0004")
        connection.commit()
        row = "number, id, name, stage, params, output_dir, created_at, state, status, version"
        values = "1, 'a', 'a', 'train', '{}', '/o', '2026-01-01T00:00:00.000000Z', 'queued', '{}', 17"
        connection.exec_driver_sql(f"INSERT INTO jobs ({row}) VALUES ({values})")
        connection.commit()
    upgrade(database.engine)
    with database.read() as session:
        [job] = jobs.unfinished_jobs(session)
        assert (job.version, job.marks) == (17, Marks.all_at(17))
        assert len(incarnation.read(session)) == 8
    database.close()
