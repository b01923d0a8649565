"""Who may ask what: Host and Origin, token or session and its scope, JSON only; what every answer carries, and what it
must not; and who asked.

Host not allowed -> 403    no token, no session -> 401    scope too small -> 403
body not JSON -> 415       body too large -> 413          write by cookie from another origin -> 403
two Hosts -> 400           its length not said -> 411     wrong tokens without end -> 429
"""

from collections.abc import Sequence
from typing import Any

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.problems import REQUEST_ID, problem_response, request_id_of
from server.domain.callers import Caller
from server.domain.callers import Scope as TokenScope
from server.domain.ids import is_job_id
from server.errors import (
    BadRequest,
    Forbidden,
    LengthRequired,
    NotJson,
    ServiceError,
    TooLarge,
    TooManyFailures,
    Unauthorized,
)
from server.services import audit
from server.services.auth import Gate
from server.services.runtime import Runtime

OPEN_PATHS = frozenset({"/healthz", "/login"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ADMIN_AREAS = frozenset({"tokens", "audit"})
"""First parts of the paths that need the scope admin, whatever the method."""

LOGIN_LINKS = "/login-links"
"""A write that every scope may do: the session gets the scope of its token."""

YAML_PATH, YAML = "/pipelines", "application/yaml"
"""Where a body may be YAML."""

MAX_BODY = 1 << 20
LARGE_BODY = 1 << 15
"""Bytes of an answer that is redacted in a thread; a smaller one takes about a millisecond."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

SIGN_IN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Eyas</title>
<p>Not signed in. A login link works once and for a few minutes: open the one the daemon printed when it started, or run
<code>eyas login</code> for a new one.
"""


class AccessControl:
    """Middleware that lets a request through or answers it with a problem.

    `routes` are those of the API, for the audit log. `ready` are the endpoints whose answers hold no secret already, or
    one that is meant to be told; every other answer is redacted on its way out.
    """

    def __init__(
        self,
        app: ASGIApp,
        runtime: Runtime,
        gate: Gate,
        cookie_name: str,
        hosts: frozenset[str],
        routes: Sequence[BaseRoute],
        ready: frozenset[Any],
    ) -> None:
        self._app = app
        self._runtime = runtime
        self._redactor = runtime.redactor
        self._gate = gate
        self._cookie_name = cookie_name
        self._hosts = LOOPBACK_NAMES | hosts
        self._routes = routes
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Judge one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {})["request_id"] = request_id_of(
            Headers(scope=scope), self._redactor.text
        )
        caller, refusal, worth_noting = self._judge(scope)
        redact = True

        async def send_on(message: Message) -> None:
            nonlocal redact
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if self._runtime.waiters.closing:
                    # A connection taken in the last moment would be served until the daemon cuts it off with a 500.
                    headers["Connection"] = "close"
                status = message["status"]
                redact = not (status < 300 and scope.get("endpoint") in self._ready)
                if worth_noting:
                    self._note(scope, caller, status, headers.get("location", ""))
            elif redact and message.get("body"):
                message = {**message, "body": await self._redacted(message["body"])}
            await send(message)

        await (refusal or self._app)(scope, receive, send_on)

    async def _redacted(self, body: bytes) -> bytes:
        if len(body) < LARGE_BODY:
            return self._redactor.data(body)
        return await run_in_threadpool(self._redactor.data, body)

    def _judge(self, scope: Scope) -> tuple[Caller | None, Response | None, bool]:
        """Who asks, the answer if it is refused, and whether it may belong into the audit log."""
        headers = Headers(scope=scope)
        path, method = scope["path"], scope["method"]
        caller = None
        try:
            _check_doubled(headers)
            self._check_host(headers)
            if path not in OPEN_PATHS:
                caller = self._caller(headers)
                _check_scope(caller, method, path)
            if method not in SAFE_METHODS:
                _check_write(headers, path, caller is not None and caller.via == "session")
        except ServiceError as error:
            noted = caller is not None or self._gate.may_fail(peer_of(scope))
            if isinstance(error, Unauthorized) and path == "/" and "text/html" in headers.get("accept", ""):
                return None, HTMLResponse(SIGN_IN, status_code=401), noted
            if isinstance(error, Unauthorized) and not noted and "authorization" in headers:
                error = TooManyFailures(f"{error.detail}; so were too many before it from this address")
            return caller, problem_response(error, path, scope["state"]["request_id"], self._redactor.text), noted
        scope["state"]["caller"] = caller
        return caller, None, True

    def _check_host(self, headers: Headers) -> None:
        """A name that merely resolves to this host (DNS rebinding) is refused."""
        name = host_name(headers.get("host", ""))
        if name not in self._hosts:
            raise Forbidden(f"Host {name!r} is not allowed; EYAS_ALLOWED_HOSTS adds names")

    def _caller(self, headers: Headers) -> Caller:
        if caller := caller_of(self._gate, self._cookie_name, headers):
            return caller
        if _bearer(headers) is not None:
            raise Unauthorized("the token is wrong, revoked or expired")
        raise Unauthorized(
            "send the header `Authorization: Bearer TOKEN`; the state directory has it in its file `token`"
        )

    def _note(self, scope: Scope, caller: Caller | None, status: int, location: str) -> None:
        """Write a write or a refusal down; a look that was granted leaves no trace."""
        method, path = scope["method"], scope["path"]
        refused = status in (401, 403)
        if not refused and (method in SAFE_METHODS and path != "/login"):
            return
        if status in (404, 405, 429):
            return
        job_id = scope.get("path_params", {}).get("job_id") or location.removeprefix("/jobs/")
        named = job_id if is_job_id(job_id) else None
        audit.note(self._runtime, caller, peer_of(scope), method[:10], self._route_of(scope), named, status)

    def _route_of(self, scope: Scope) -> str | None:
        """The path of the route that is meant, without what stands in its places; None where there is no such route."""
        matching = (one for one in self._routes if isinstance(one, Route) and one.matches(scope)[0] == Match.FULL)
        route = next(matching, None)
        return None if route is None else route.path


def caller_of(gate: Gate, cookie_name: str, headers: Headers) -> Caller | None:
    """Who sends these headers: by the token in them, else by the session cookie."""
    token = _bearer(headers)
    if token is not None:
        return gate.caller_of_token(token)
    cookie = cookie_parser(headers.get("cookie", "")).get(cookie_name)
    return None if cookie is None else gate.caller_of_cookie(cookie)


def _bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def needed_scope(method: str, path: str) -> TokenScope:
    """What a caller must be allowed to send this."""
    if path.lstrip("/").partition("/")[0] in ADMIN_AREAS:
        return TokenScope.ADMIN
    if method in SAFE_METHODS or path == LOGIN_LINKS:
        return TokenScope.READ
    return TokenScope.SUBMIT


def _check_scope(caller: Caller, method: str, path: str) -> None:
    needed = needed_scope(method, path)
    if not caller.scope.covers(needed):
        raise Forbidden(f"this needs a token with the scope {needed}; {caller.name!r} has {caller.scope}")


def _check_doubled(headers: Headers) -> None:
    """Refuse two of what counts once: programs on the way may read the other one."""
    for once in ("host", "idempotency-key"):
        if len(headers.getlist(once)) > 1:
            raise BadRequest(f"{once} is sent more than once")


def _check_write(headers: Headers, path: str, by_cookie: bool) -> None:
    origin = headers.get("origin")
    if by_cookie and (origin is None or origin.partition("://")[2] != headers.get("host")):
        raise Forbidden(f"a write with a session cookie must come from the page itself, not from {origin}")
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("a write from another site is refused")
    length = headers.get("content-length", "0")
    has_body = length != "0" or "transfer-encoding" in headers
    kind = media_type(headers)
    # No page of another origin can send either without asking first: neither is what a form can send.
    if (has_body or by_cookie) and kind != "application/json" and not (kind == YAML and path == YAML_PATH):
        raise NotJson(f"the body must be sent as application/json, to {YAML_PATH} also as {YAML}")
    if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise NotJson(f"a body with Content-Encoding {coding} is not unpacked; send it as it is")
    if "transfer-encoding" in headers:
        raise LengthRequired(f"a body says in Content-Length how many bytes it has, at most {MAX_BODY}; not in chunks")
    if int(length) > MAX_BODY:
        raise TooLarge(f"a body has at most {MAX_BODY} bytes")


def media_type(headers: Headers) -> str:
    """What a body is announced as, without parameters; the case of it means nothing (RFC 9110, 8.3.1)."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def peer_of(scope: Scope) -> str | None:
    """The address a request came from."""
    client = scope.get("client")
    return None if client is None else str(client[0])


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
