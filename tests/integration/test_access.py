"""Who gets in, what is refused and how it is said. One daemon, plain HTTP."""

import json
import socket

import httpx
import pytest

from eagle3_core.contract.params import STAGES


@pytest.fixture(scope="module")
def http(shared):
    daemon, _ = shared
    with httpx.Client(base_url=daemon.client.url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture
def token(shared):
    daemon, _ = shared
    return {"Authorization": "Bearer " + (daemon.state / "token").read_text().strip()}


def test_token_file_and_state_directory_are_private(shared):
    daemon, _ = shared
    assert (daemon.state / "token").stat().st_mode & 0o777 == 0o600
    assert daemon.state.stat().st_mode & 0o777 == 0o700
    assert (daemon.state / "token").read_text().strip().encode() not in daemon.output


@pytest.mark.parametrize("path", ["/jobs", "/jobs/x", "/", "/openapi.json", "/page.js", "/nothing"])
def test_every_route_needs_a_token(http, path):
    answer = http.get(path)
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_health_needs_none(http):
    answer = http.get("/healthz")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", ""])
def test_foreign_host_names_are_refused(http, token, host):
    assert http.get("/jobs", headers={**token, "Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "[::1]:8765"])
def test_loopback_names_are_accepted(http, token, host):
    assert http.get("/jobs", headers={**token, "Host": host}).status_code == 200


def test_login_link_works_once_and_the_cookie_is_enough(http, token, shared):
    daemon, planned = shared
    link = http.post("/login-links", headers=token).json()["url"]
    with httpx.Client(base_url=daemon.client.url, trust_env=False, timeout=60) as browser:
        page = browser.get("/", headers={"Accept": "text/html"})
        assert page.status_code == 401
        assert "eyas login" in page.text
        answer = browser.get(link)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Max-Age=43200" in cookie
        page = browser.get("/")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for path in ("/page.js", "/page.css", "/jobs"):
            assert browser.get(path).status_code == 200
        secret = token["Authorization"].split()[1]
        assert secret not in page.text
        assert secret not in browser.get("/page.js").text
        request = planned()
        assert browser.post("/jobs", json=request).status_code == 403
        for origin in ("http://evil.example", "null", "http://[", daemon.client.url + ".evil.example"):
            assert browser.post("/jobs", json=request, headers={"Origin": origin}).status_code == 403
        assert browser.post("/jobs", json=request, headers={"Origin": daemon.client.url}).status_code == 201
    assert http.get(link).headers["content-type"] == "application/problem+json"
    used = http.get(link, headers={"Accept": "text/html"})
    assert (used.status_code, "eyas login" in used.text) == (401, True)


def test_the_link_printed_at_start_signs_in(shared):
    daemon, _ = shared
    assert httpx.get(daemon.login_link, trust_env=False, timeout=60).status_code == 303


def test_writes_from_other_sites_and_other_types_are_refused(http, token):
    assert http.post("/jobs", content=b"{}", headers=token).status_code == 415
    form = {**token, "Content-Type": "text/plain"}
    assert http.post("/jobs", content=b"{}", headers=form).status_code == 415
    cross = {**token, "Sec-Fetch-Site": "cross-site"}
    assert http.post("/jobs", json={}, headers=cross).status_code == 403
    huge = http.post("/jobs", content=b" " * (1 << 20) + b"{}", headers={**token, "Content-Type": "application/json"})
    assert huge.status_code == 413


def test_a_body_is_taken_by_what_it_says_of_itself_in_any_case(http, token):
    json_body = {**token, "Content-Type": "Application/JSON; charset=UTF-8"}
    assert http.post("/jobs", content=b"{}", headers=json_body).status_code == 422
    yaml = {**token, "Content-Type": "application/YAML"}
    assert http.post("/pipelines", content=b"name: x", headers=yaml).status_code == 422
    packed = http.post("/jobs", content=b"\x1f\x8b", headers={**json_body, "Content-Encoding": "gzip"})
    assert (packed.status_code, packed.json()["type"]) == (415, "urn:eyas:problem:unsupported-media-type")
    chunked = http.post("/jobs", content=iter([b"{}"]), headers=json_body)
    assert (chunked.status_code, chunked.json()["type"]) == (411, "urn:eyas:problem:length-required")


def raw(shared, head, body=b""):
    daemon, _ = shared
    with socket.create_connection(("127.0.0.1", int(daemon.client.url.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    return answer.partition(b"\r\n\r\n")


def test_a_request_that_names_two_hosts(shared, token):
    bearer = f"Authorization: {token['Authorization']}\r\nConnection: close\r\n"
    two = raw(shared, f"GET /jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n{bearer}")
    assert two[0].startswith(b"HTTP/1.1 400 ")


def test_an_offer_of_another_protocol_is_no_word_in_the_log(shared):
    daemon, _ = shared
    offer = "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
    assert raw(shared, offer)[0].startswith(b"HTTP/1.1 200 ")
    assert b"WebSocket" not in (daemon.root / "daemon.log").read_bytes()


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/jobs", "GET, POST"), ("/jobs/aaaaaaaaaa", "DELETE, GET"), ("/tokens", "GET, POST"), ("/gpus", "GET")],
)
def test_a_method_that_a_path_does_not_know_is_told_all_it_knows(http, token, path, methods):
    for method in ("PUT", "PATCH", "OPTIONS", "TRACE"):
        answer = http.request(method, path, headers={**token, "Content-Type": "application/json"})
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)
        assert answer.json()["detail"].endswith(f"it knows {methods}")


def test_bodies_that_are_not_json(http, token):
    headers = {**token, "Content-Type": "application/json"}
    answer = http.post("/jobs", content=b'{"stage": ', headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:eyas:problem:not-json")
    for body, told in (
        (b'{"a": ' + b"9" * 5000 + b"}", "more digits"),
        (b'{"a": ' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"),
        (b'{"stage": "\xff"}', "not UTF-8 (byte 11)"),
        ('{"stage": "train"}'.encode("utf-16"), "not UTF-8"),
        (b'{"stage": "validate", "params": {"checkpoint": "/a", "checkpoint": "/b"}}', "'checkpoint' comes twice"),
        (b'{"stage": "train"}}', "Extra data: line 1 column 19"),
    ):
        for path in ("/jobs", "/pipelines"):
            answer = http.post(path, content=body, headers=headers)
            assert (answer.status_code, answer.json()["type"]) == (400, "urn:eyas:problem:not-json")
            assert told in answer.json()["detail"]
    lone = b'{"stage": "validate", "params": {"checkpoint": "/"}, "depends_on": ["\\ud800"]}'
    for body in (lone, b"[]", b"null", b"3", b'"x"', b"{}", b'{"jobs": []}', b'{"jobs": 3}', b"[" * 100_000, b"\xff"):
        answer = http.post("/jobs", content=body, headers=headers)
        assert answer.status_code in (400, 422), (body[:20], answer.text)
        assert answer.headers["content-type"] == "application/problem+json"


IDS = ["..%2f..%2fetc", "%2e%2e", "a%00b", "a%2fb", "%ff", "x" * 65, "-rf", ".hidden", "a%0ab"]


@pytest.mark.parametrize("job_id", IDS)
@pytest.mark.parametrize("rest", ["", "/log", "/events", "/checkpoints"])
def test_ids_that_would_leave_the_jobs_directory(http, token, job_id, rest):
    answer = http.get(f"/jobs/{job_id}{rest}", headers=token)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    if not rest:
        assert http.post(f"/jobs/{job_id}/cancel", headers=token).status_code == 404


@pytest.mark.parametrize(
    "query", ["log?offset=-1", "log?offset=x", "log?limit=99999999999", "log?offset=1e30", "events?after=-1",
              "events?limit=0", f"log?offset={1 << 70}", "log?attempt=0"]
)  # fmt: skip
def test_queries_that_make_no_sense(http, token, shared, query):
    daemon, planned = shared
    job = daemon.client.submit(planned())[0]["id"]
    answer = http.get(f"/jobs/{job}/{query}", headers=token)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"].startswith("?")


def test_other_refusals_are_problems_too(http, token):
    for answer in (
        http.get("/nothing", headers=token),
        http.put("/jobs", headers=token),
        http.get("/jobs/", headers=token),
    ):
        assert answer.status_code in (404, 405)
        assert answer.headers["content-type"] == "application/problem+json"


def test_openapi_describes_the_parameters_of_every_stage(http, token):
    document = http.get("/openapi.json", headers=token).json()
    described = document["components"]["schemas"]["JobRequest"]["properties"]["params"]["anyOf"]
    assert [set(schema["properties"]) for schema in described] == [set(p.model_fields) for p in STAGES.values()]


def test_openapi_names_its_operations(http, token):
    document = http.get("/openapi.json", headers=token).json()
    operations = {method["operationId"] for path in document["paths"].values() for method in path.values()}
    assert {"submitJobs", "listJobs", "getJob", "getLog", "getEvents", "cancelJob", "listCheckpoints"} <= operations


def test_what_is_no_http_is_a_problem_too(http):
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=25) as connection:
        connection.sendall(b"\x16\x03\x01 garbage\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head, body = answer.split(b"\r\n\r\n")
    assert b"application/problem+json" in head
    assert json.loads(body)["status"] == 400


@pytest.mark.parametrize("begin", [b"GET /healthz?", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: "])
def test_a_head_without_an_end_is_not_kept(http, begin):
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=25) as connection:
        connection.sendall(begin)
        answer = b""
        for _ in range(40):
            try:
                connection.sendall(b"a" * (64 << 10))
                answer += connection.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:  # closed, as it should be
                break
        else:
            pytest.fail("two and a half megabytes of headers were taken")
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 431 ") and b"problem:head-too-large" in answer)
    assert http.get("/healthz").status_code == 200


def test_a_large_body_in_pieces_is_no_head(http, token):
    padding = " " * 900_000
    answer = http.post(
        "/jobs", content=f'{{"stage": "none"{padding}}}', headers={**token, "Content-Type": "application/json"}
    )
    assert answer.status_code == 422
