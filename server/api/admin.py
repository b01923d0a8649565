"""Tokens and the audit log: what only the scope admin reaches."""

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query
from pydantic import BaseModel, ConfigDict, Field, Strict

from server.api.context import Context
from server.api.problems import Problem
from server.api.routes import KnownQuery
from server.domain.callers import Scope, Token
from server.services import audit
from server.services.auth import Gate

_PROBLEM = {"model": Problem, "content": {"application/problem+json": {}}}
_KNOWN: dict[int | str, dict[str, Any]] = {401: _PROBLEM, 403: _PROBLEM, 422: _PROBLEM}

router = APIRouter(tags=["daemon"], responses=_KNOWN, route_class=KnownQuery)


class TokenRequest(BaseModel):
    """A token to make."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="of a person or program; never used again"
    )
    scope: Annotated[Scope, Strict(False)] = Field(
        description="read: look; submit: and act on jobs; admin: and act on the daemon"
    )
    days: float | None = Field(None, gt=0, le=3650, description="life; without it, until it is revoked")


class TokenRow(BaseModel):
    """A token, without its secret."""

    name: str
    scope: Scope
    state: Literal["active", "expired", "revoked"]
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None = Field(description="to the minute")
    revoked_at: datetime | None


class NewToken(TokenRow):
    """A token that was made."""

    token: str = Field(description="the secret, told this once")


class TokenList(BaseModel):
    """Oldest first; the owner's own is not among them."""

    tokens: list[TokenRow]


class AuditRow(BaseModel):
    """A write or a refused attempt."""

    time: datetime
    actor: str | None = Field(description="name of the token; null for a caller that is not known")
    via: str | None = Field(description="token, session (of a login link that token made), or local (a command file)")
    peer: str | None = Field(description="address it came from")
    method: str
    route: str | None = Field(description="as this document names it; null when there is no such route")
    job_id: str | None
    status: int = Field(description="of the answer")


class AuditPage(BaseModel):
    """Newest first."""

    entries: list[AuditRow]
    next_cursor: int | None = Field(description="send it as `cursor` for older ones; null at the end")


@router.post("/tokens", status_code=201, operation_id="createToken", responses={409: _PROBLEM})
def post_token(context: Context, body: Annotated[TokenRequest, Body()]) -> NewToken:
    """A new token; only its hash is kept, so this answer is the one place that shows it."""
    token, secret = context.gate.create_token(body.name, body.scope, body.days)
    return NewToken(**_row(context.gate, token).model_dump(), token=secret)


@router.get("/tokens", operation_id="listTokens")
def get_tokens(context: Context) -> TokenList:
    """Every token, also those that are over."""
    return TokenList(tokens=[_row(context.gate, token) for token in context.gate.tokens()])


@router.delete("/tokens/{name}", operation_id="revokeToken", responses={404: _PROBLEM})
def delete_token(context: Context, name: str) -> TokenRow:
    """Accept a token, and the browser sessions it began, no more."""
    return _row(context.gate, context.gate.revoke(name))


@router.get("/audit", operation_id="listAudit")
def get_audit(
    context: Context,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[int | None, Query(ge=1, le=1 << 62)] = None,
) -> AuditPage:
    """Who wrote what, and who was refused; never what was sent."""
    entries, next_cursor = audit.read(context.runtime, cursor, limit)
    return AuditPage(entries=[AuditRow(**vars(entry)) for entry in entries], next_cursor=next_cursor)


def _row(gate: Gate, token: Token) -> TokenRow:
    return TokenRow(
        name=token.name,
        scope=token.scope,
        state=gate.state_of(token),
        created_at=token.created_at,
        expires_at=token.expires_at,
        last_used_at=token.last_used_at,
        revoked_at=token.revoked_at,
    )
