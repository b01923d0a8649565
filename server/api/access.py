"""Who may ask what: Host and Origin, token or session, JSON only, and the headers every answer carries.

Host not allowed -> 403    no token, no session -> 401    write by cookie from another origin -> 403
body not JSON -> 415       body too large -> 413
"""

from fastapi.responses import HTMLResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.problems import problem_response
from server.errors import Forbidden, NotJson, ServiceError, TooLarge, Unauthorized
from server.services.auth import Gate

OPEN_PATHS = frozenset({"/healthz", "/login"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_BODY = 1 << 20
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

SIGN_IN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Eyas</title>
<p>Not signed in. A login link works once and for a few minutes: open the one the daemon printed when it started, or run
<code>eyas login</code> for a new one.
"""


class AccessControl:
    """Middleware that lets a request through or answers it with a problem."""

    def __init__(self, app: ASGIApp, gate: Gate, cookie_name: str, hosts: frozenset[str]) -> None:
        self._app = app
        self._gate = gate
        self._cookie_name = cookie_name
        self._hosts = LOOPBACK_NAMES | hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Judge one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._judge(scope)
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await refusal(scope, receive, send_with_headers)

    def _judge(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            by_cookie = self._check_caller(scope["path"], headers)
            if scope["method"] not in SAFE_METHODS:
                _check_write(headers, by_cookie)
        except Unauthorized as error:
            if scope["path"] == "/" and "text/html" in headers.get("accept", ""):
                return HTMLResponse(SIGN_IN, status_code=401)
            return problem_response(error, scope["path"])
        except ServiceError as error:
            return problem_response(error, scope["path"])
        return None

    def _check_host(self, headers: Headers) -> None:
        """A name that merely resolves to this host (DNS rebinding) is refused."""
        name = host_name(headers.get("host", ""))
        if name not in self._hosts:
            raise Forbidden(f"Host {name!r} is not allowed; EYAS_ALLOWED_HOSTS adds names")

    def _check_caller(self, path: str, headers: Headers) -> bool:
        """Whether the caller is known by its cookie (and not by the token)."""
        if path in OPEN_PATHS:
            return False
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            if self._gate.is_token(token.strip()):
                return False
            raise Unauthorized("the token is wrong")
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie_name)
        if cookie is not None and self._gate.is_session(cookie):
            return True
        raise Unauthorized("send the header `Authorization: Bearer TOKEN`; the token is in the state directory")


def _check_write(headers: Headers, by_cookie: bool) -> None:
    origin = headers.get("origin")
    if by_cookie and (origin is None or origin.partition("://")[2] != headers.get("host")):
        raise Forbidden(f"a write with a session cookie must come from the page itself, not from {origin}")
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("a write from another site is refused")
    length = headers.get("content-length", "0")
    has_body = length != "0" or "transfer-encoding" in headers
    if (has_body or by_cookie) and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise NotJson("the body must be sent as application/json")
    if "transfer-encoding" in headers or not length.isdigit() or int(length) > MAX_BODY:
        raise TooLarge(f"a body has at most {MAX_BODY} bytes and says how many in Content-Length")


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
