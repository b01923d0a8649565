"""What browsers and probes ask for: the page, its two files, the login link, the health of the daemon."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse
from fastapi.templating import Jinja2Templates
from pydantic import BaseModel

from server.api.access import SIGN_IN, peer_of
from server.api.context import Context, From
from server.errors import TooManyFailures, Unauthorized

WEB = Path(__file__).parents[1] / "web"
VERSION = version("eyas")

router = APIRouter()
templates = Jinja2Templates(directory=WEB)


class Health(BaseModel):
    """Whether the daemon works."""

    status: Literal["ok", "failing"]
    version: str


class LoginLink(BaseModel):
    """A link that signs a browser in, once."""

    url: str


@router.get("/healthz", operation_id="getHealth", tags=["daemon"], responses={503: {"model": Health}})
async def get_health(context: Context, response: Response) -> Health:
    """Needs no token. 503 when the loop that watches the jobs has died."""
    if not context.loop.alive:
        response.status_code = 503
        return Health(status="failing", version=VERSION)
    return Health(status="ok", version=VERSION)


@router.post("/login-links", status_code=201, operation_id="makeLoginLink", tags=["daemon"])
async def post_login_link(context: Context, caller: From, request: Request) -> LoginLink:
    """A new login link, good once and for a few minutes; the session may do what the token may."""
    code = context.gate.new_code(caller)
    return LoginLink(url=f"{request.url.scheme}://{request.headers['host']}/login?code={code}")


@router.get("/login", include_in_schema=False)
def get_login(context: Context, request: Request, code: Annotated[str, Query(max_length=200)] = "") -> Response:
    """Turn a login code into a session cookie."""
    cookie = context.gate.redeem(code)
    if cookie is None and not context.gate.may_fail(peer_of(request.scope)):
        raise TooManyFailures("this login link is wrong; so were too many attempts before it from this address")
    if cookie is None and "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(SIGN_IN, status_code=401)
    if cookie is None:
        raise Unauthorized("this login link was used already or is too old; run `eyas login` for a new one")
    response = RedirectResponse("/", status_code=303)
    response.set_cookie(
        context.cookie_name,
        cookie,
        max_age=round(context.runtime.settings.session_hours * 3600),
        httponly=True,
        samesite="strict",
    )
    return response


@router.get("/", include_in_schema=False)
def get_page(request: Request) -> HTMLResponse:
    """The status page."""
    return templates.TemplateResponse(request, "page.html", {"version": VERSION})


@router.get("/page.js", include_in_schema=False)
async def get_script() -> FileResponse:
    """The page's script."""
    return FileResponse(WEB / "page.js", media_type="text/javascript; charset=utf-8")


@router.get("/page.css", include_in_schema=False)
async def get_style() -> FileResponse:
    """The page's style."""
    return FileResponse(WEB / "page.css", media_type="text/css; charset=utf-8")
