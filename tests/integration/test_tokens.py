"""Who may do what: scopes, revocation, sessions of a token, failed attempts, the audit log."""

import re
from contextlib import ExitStack

import httpx
import pytest

from client.http import ApiError, EyasClient
from server.api.access import OPEN_PATHS
from server.app import ROUTERS
from server.db.engine import Database
from server.db.migrate import upgrade
from server.services import audit
from server.services.runtime import Runtime
from server.settings import Settings


def routes():
    """(method, path) of everything the daemon answers to, with something in every place."""
    found = [
        (method, re.sub(r"{\w+}", "x", route.path))
        for router in ROUTERS
        for route in router.routes
        for method in route.methods
    ]
    return [*found, ("GET", "/openapi.json")]


@pytest.fixture
def daemon(new_daemon):
    return new_daemon()


@pytest.fixture
def of():
    """Clients with another token, closed at the end."""
    with ExitStack() as clients:
        yield lambda daemon, secret: clients.enter_context(EyasClient(daemon.client.url, secret))


@pytest.fixture
def ask():
    """Sends a request with or without a token; one client for all, as each would load the certificates anew."""
    with httpx.Client(trust_env=False, timeout=60) as http:

        def send(daemon, method, path, secret=None):
            headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
            return http.request(method, daemon.client.url + path, headers=headers)

        yield send


def test_nothing_but_the_documented_open_routes_answers_without_credentials(daemon, ask):
    right = (daemon.state / "token").read_text().strip()
    described = set(ask(daemon, "GET", "/openapi.json", right).json()["paths"])
    assert described <= {
        route.path_format for router in ROUTERS for route in router.routes
    }  # so that none is passed over
    assert len(routes()) > 20
    for method, path in routes():
        answered = ask(daemon, method, path).status_code
        assert answered == 401 if path not in OPEN_PATHS else (path, answered) in {("/healthz", 200), ("/login", 401)}


def test_each_scope_reaches_what_it_is_for_and_no_more(daemon, ask):
    secrets = {scope: daemon.client.create_token(f"t-{scope}", scope)["token"] for scope in ("read", "submit", "admin")}
    rank = ["read", "submit", "admin"]
    for method, path in routes():
        needed = "read" if method in ("GET", "HEAD") or path == "/login-links" else "submit"
        needed = "admin" if path.startswith(("/tokens", "/audit")) else needed
        for scope, secret in secrets.items():
            answer = ask(daemon, method, path, secret)
            refused = answer.status_code == 403
            assert refused == (rank.index(scope) < rank.index(needed)), (method, path, scope, answer.text)
            if refused:
                assert f"scope {needed}" in answer.json()["detail"]


def test_a_token_is_shown_once_and_kept_as_a_hash(daemon, of):
    made = daemon.client.create_token("ci", "submit", days=1)
    assert made["token"].startswith("eyas_")
    assert of(daemon, made["token"]).jobs() == []
    [row] = daemon.client.tokens()
    assert (row["name"], row["scope"], row["state"]) == ("ci", "submit", "active")
    assert row["last_used_at"] is not None
    assert made["token"] not in str(row)
    daemon.stop()
    stored = b"".join(path.read_bytes() for path in daemon.state.glob("eyas.db*"))
    assert made["token"].encode() not in stored
    daemon.start()
    assert of(daemon, made["token"]).jobs() == []
    for name in ("ci", "owner", "local"):
        with pytest.raises(ApiError) as caught:
            daemon.client.create_token(name, "read")
        assert caught.value.status == 409


def test_a_revoked_token_ends_with_the_sessions_it_began(daemon, of, ask):
    secret = daemon.client.create_token("guest", "read")["token"]
    with httpx.Client(base_url=daemon.client.url, trust_env=False, timeout=60) as browser:
        assert browser.get(of(daemon, secret).login_link()).status_code == 303
        assert browser.get("/jobs").status_code == 200
        write = {"Origin": daemon.client.url, "Content-Type": "application/json"}
        refused = browser.post("/jobs/x/cancel", headers=write, content=b"{}")
        assert (refused.status_code, "scope submit" in refused.json()["detail"]) == (403, True)
        assert daemon.client.revoke_token("guest")["state"] == "revoked"
        assert browser.get("/jobs").status_code == 401
    assert ask(daemon, "GET", "/jobs", secret).status_code == 401


def test_an_expired_token_is_refused(daemon, wait_for, ask):
    secret = daemon.client.create_token("brief", "read", days=1 / 86_400)["token"]
    wait_for(lambda: ask(daemon, "GET", "/jobs", secret).status_code == 401, what="the end of the token")
    assert daemon.client.tokens()[0]["state"] == "expired"


def test_external_jobs_need_the_scope_admin_or_a_setting(new_daemon, of):
    request = {"stage": "external", "params": {"argv": ["/bin/true"]}}
    first = new_daemon(EYAS_EXTERNAL_PROGRAMS='["/bin/true"]')
    secret = first.client.create_token("ci", "submit")["token"]
    for body in (request, {"jobs": [request]}):
        with pytest.raises(ApiError) as caught:
            of(first, secret).submit(body)
        assert caught.value.status == 403
        assert caught.value.fields[0]["pointer"].endswith("/stage")
        assert "scope admin" in str(caught.value)
    assert first.client.submit(request)
    first.stop()
    second = new_daemon(EYAS_EXTERNAL_PROGRAMS='["/bin/true"]', EYAS_EXTERNAL_SCOPE="submit")
    assert of(second, secret).submit(request)


def test_wrong_tokens_without_end_are_answered_briefly_and_a_right_one_always(daemon):
    right = (daemon.state / "token").read_text().strip()
    with httpx.Client(base_url=daemon.client.url, trust_env=False, timeout=60) as http:
        wrong = {"Authorization": "Bearer wrong", "X-Forwarded-For": "203.0.113.7"}
        answers = [http.get("/jobs", headers=wrong) for _ in range(150)]
        assert [answer.status_code for answer in answers[:50]] == [401] * 50
        assert answers[-1].status_code == 429
        assert answers[-1].headers["Retry-After"]
        assert http.get("/login?code=wrong").status_code == 429
        assert http.get("/jobs", headers={"Authorization": f"Bearer {right}"}).status_code == 200
    entries = daemon.client.audit(limit=1000)["entries"]
    refused = [entry for entry in entries if entry["status"] == 401]
    assert 50 <= len(refused) < 100
    assert {entry["peer"] for entry in refused} == {"127.0.0.1"}  # not what a header says


def test_the_audit_log_says_who_did_what(daemon, of):
    secret = daemon.client.create_token("ci", "submit")["token"]
    body = {"stage": "external", "params": {"argv": ["/bin/true"]}}
    with pytest.raises(ApiError):
        of(daemon, secret).submit(body)
    with pytest.raises(ApiError):
        daemon.client.cancel("nothing")
    with pytest.raises(ApiError):
        of(daemon, "wrong").jobs()
    page = daemon.client.audit()
    assert [(one["actor"], one["via"], one["method"], one["route"], one["status"]) for one in page["entries"]] == [
        (None, None, "GET", "/jobs", 401),
        ("ci", "token", "POST", "/jobs", 403),
        ("owner", "token", "POST", "/tokens", 201),
    ]
    assert page["next_cursor"] is None
    first = daemon.client.audit(limit=2)
    assert daemon.client.audit(limit=2, cursor=first["next_cursor"])["entries"] == page["entries"][2:]


def test_jobs_and_local_cancels_are_in_the_audit_log(shared):
    daemon, planned = shared
    [one] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(one["id"], "running")
    order = daemon.state / "jobs" / one["id"] / "control" / "cancel.json"
    order.write_text('{"grace_s": 5}')
    daemon.wait_ended(one["id"])

    def noted():
        entries = [entry for entry in daemon.client.audit()["entries"] if entry["job_id"] == one["id"]]
        return [(entry["actor"], entry["via"], entry["route"]) for entry in entries]

    assert noted() == [("local", "local", "/jobs/{job_id}/cancel"), ("owner", "token", "/jobs")]


def test_a_full_disk_keeps_nobody_waiting_for_the_audit_log(tmp_path):
    """Entries wait in memory, are stored in order once there is room, and the oldest of each kind go first."""
    database = Database(tmp_path / "eyas.db")
    upgrade(database.engine)
    runtime = Runtime(Settings(state=tmp_path, audit_rows=100), database)

    def limit_pages(count):
        with database.engine.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA max_page_count={count}")

    limit_pages(1)
    for number in range(1000):
        audit.note(runtime, None, "127.0.0.1", "GET", f"/{number}", None, 401 if number % 2 else 201)
    assert audit.read(runtime, None, 1000) == ([], None)
    limit_pages(100_000)
    entries, _ = audit.read(runtime, None, 1000)
    granted = [entry.route for entry in entries if entry.status == 201]
    assert (granted[0], len(granted), len(entries) - len(granted)) == ("/998", 100, 10)
    database.close()
