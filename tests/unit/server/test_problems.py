"""Every error is a problem with a name that the log knows, a bug too."""

import asyncio
import logging

import httpx
import pytest

from server.app import build_app
from server.db.engine import Database
from server.db.migrate import upgrade
from server.domain.redaction import Redactor
from server.errors import InsufficientStorage
from server.services.auth import Gate
from server.services.runtime import Runtime
from server.settings import Settings

TOKEN = "eyas_" + "t" * 40


@pytest.fixture
def runtime(tmp_path):
    database = Database(tmp_path / "eyas.db")
    upgrade(database.engine)
    yield Runtime(Settings(state=tmp_path), database, Redactor(["the-secret-word"]))
    database.close()


@pytest.fixture
def ask(runtime):
    """Sends a request to the app, with two routes more: one that has a bug, one that finds a disk full."""
    app = build_app(runtime, Gate(runtime, TOKEN), lambda: None, 1)

    async def bug() -> None:
        raise KeyError("the-secret-word")

    async def full() -> None:
        raise InsufficientStorage("no room for the-secret-word")

    app.add_api_route("/bug", bug)
    app.add_api_route("/full", full)

    def send(path, **headers):
        async def once():
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.get(path, headers={"Authorization": f"Bearer {TOKEN}", **headers})

        return asyncio.run(once())

    return send


def test_a_bug_has_the_name_of_its_request_and_gives_nothing_away(ask, caplog):
    answer = ask("/bug", **{"X-Request-ID": "call-1"})
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "call-1"
    assert answer.json()["type"] == "urn:eyas:problem:internal"
    assert "secret" not in answer.text
    [record] = [record for record in caplog.records if record.name == "server.api.problems"]
    assert "call-1" in record.getMessage()
    assert record.exc_info is not None


def test_what_is_the_hosts_fault_is_in_the_log_by_that_name(ask, caplog):
    with caplog.at_level(logging.ERROR, "server.api.problems"):
        answer = ask("/full")
    assert answer.status_code == 507
    assert answer.json()["detail"] == "no room for ***************"
    assert any(answer.json()["request_id"] in record.getMessage() for record in caplog.records)


def test_what_a_client_did_wrong_is_not_in_the_log(ask, caplog):
    assert ask("/jobs/nothing").status_code == 404
    assert ask("/jobs?limit=x").status_code == 422
    assert [record for record in caplog.records if record.name == "server.api.problems"] == []


def test_a_daemon_that_goes_keeps_no_connection(ask, runtime):
    assert "connection" not in ask("/jobs/nothing").headers
    runtime.waiters.close()
    assert ask("/jobs/nothing").headers["connection"] == "close"
