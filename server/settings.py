"""Settings of the daemon, and the only place that reads the environment.

Each field is also a variable with the prefix EYAS_, for instance EYAS_PORT. Lists are JSON: EYAS_ROOTS='["/data"]'.
"""

import difflib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from eagle3_core.contract.exits import DEFAULT_GRACE_S
from eagle3_core.contract.jobdir import (
    JOB_ID_VARIABLE,
    LOCK_FD_VARIABLE,
    MAX_SECONDS_VARIABLE,
    OUTPUT_DIR_VARIABLE,
)

_OTHERS = frozenset(
    {"EYAS_URL", "EYAS_TOKEN", JOB_ID_VARIABLE, LOCK_FD_VARIABLE, OUTPUT_DIR_VARIABLE, MAX_SECONDS_VARIABLE}
)
"""Variables with our prefix that are read by the client or handed to workers."""


class Settings(BaseSettings):
    """How one daemon runs."""

    model_config = SettingsConfigDict(env_prefix="EYAS_", frozen=True)

    state: Path = Field(Path("~/.local/state/eyas"), description="state directory")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8765, ge=0, le=65535, description="0 takes a free one")
    roots: tuple[Path, ...] = Field((), description="directories jobs may read and write, besides the state directory")
    allowed_hosts: tuple[str, ...] = Field((), description="further names accepted in the Host header")
    worker_python: Path = Field(Path(sys.executable), description="interpreter with the trainer's environment")
    external_programs: tuple[Path, ...] = Field((), description="programs that `external` jobs may start")
    max_running: int = Field(1, ge=1, description="jobs without a GPU that run at the same time")
    gpus: tuple[str, ...] | None = Field(
        None, description="GPUs that jobs may be given, by index or UUID; all when unset"
    )
    grace_s: float = Field(DEFAULT_GRACE_S, ge=0, description="seconds a cancelled stage has to put its work down")
    quiet_after_s: float = Field(60.0, gt=0, description="seconds without an event that make `health` quiet")
    stall_factor: float = Field(
        20.0, ge=1, description="a job is stalled after this many times its median time between progress events"
    )
    stall_after_s: float = Field(120.0, gt=0, description="seconds, the least that is waited for progress")
    stall_silent_after_s: float = Field(
        1800.0, gt=0, description="seconds, the same for phases without progress, such as loading and validating"
    )
    disk_low_gb: float = Field(
        2.0,
        ge=0,
        description="GB that stay free: below them no attempt starts, where it writes or in the state directory",
    )
    disk_reserve_mb: int = Field(
        32,
        ge=0,
        description="MB of a file in the state directory that is given up so that the daemon can go on writing",
    )
    max_wait_s: float = Field(1800.0, gt=0, le=86_400, description="seconds a request may wait for news")
    heartbeat_s: float = Field(
        15.0, gt=0, description="seconds between signs of life of a stream that has nothing to say"
    )
    unread_s: float = Field(
        60.0, gt=0, description="seconds a client may take nothing of what it is sent before its connection is closed"
    )
    silent_s: float = Field(
        30.0, gt=0, description="seconds a new connection may send no request, and a request may take to send its body"
    )
    session_hours: float = Field(12.0, gt=0, description="life of a browser session")
    login_minutes: float = Field(10.0, gt=0, description="life of a login link")
    external_scope: Literal["admin", "submit"] = Field("admin", description="what a token needs for `external` jobs")
    allow_remote_code: bool = Field(False, description="jobs may ask to run code that a verifier's directory brings")
    secret_variables: tuple[str, ...] = Field(
        (), description="further environment variables whose values are never shown, besides those named like a secret"
    )
    audit_rows: int = Field(100_000, ge=100, description="entries of the audit log; of refused attempts a tenth of it")

    @field_validator("state", mode="after")
    @classmethod
    def _absolute_state(cls, value: Path) -> Path:
        return value.expanduser().resolve()

    @field_validator("roots", "external_programs", mode="after")
    @classmethod
    def _absolute_paths(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser().resolve() for path in value)

    @field_validator("gpus", mode="before")
    @classmethod
    def _indices_as_text(cls, value: object) -> object:
        return [str(one) for one in value] if isinstance(value, (list, tuple)) else value

    @field_validator("worker_python", mode="after")
    @classmethod
    def _absolute_python(cls, value: Path) -> Path:
        return value.expanduser().absolute()  # not resolved: a link in a venv is what makes it that venv's python

    @property
    def jobs_dir(self) -> Path:
        """Where the job directories are."""
        return self.state / "jobs"

    @property
    def trash_dir(self) -> Path:
        """Where the directories of deleted jobs are until all of them is removed."""
        return self.state / "trash"

    @property
    def database(self) -> Path:
        """The index of the job directories."""
        return self.state / "eyas.db"

    @property
    def reserve_file(self) -> Path:
        """Room for the daemon's own writes on a full disk."""
        return self.state / "reserve"

    @property
    def token_file(self) -> Path:
        """The bearer token, mode 0600."""
        return self.state / "token"

    @property
    def address_file(self) -> Path:
        """Where a client on this host finds the daemon: {"url", "pid"}."""
        return self.state / "daemon.json"

    @property
    def all_roots(self) -> tuple[Path, ...]:
        """The state directory and `roots`, each once."""
        return tuple(dict.fromkeys((self.state, *self.roots)))


def faults_of(error: ValidationError) -> list[str]:
    """What is wrong with each setting, by its variable, with what to write instead."""
    found = []
    for fault in error.errors():
        unread = re.search(r'value for field "(\w+)"', fault["msg"])  # no JSON: pydantic-settings names no place then
        name = unread[1] if unread else str(fault["loc"][0])
        text = fault["msg"].removeprefix("Value error, ")
        if unread or fault["type"] == "tuple_type":
            text = f"""write a JSON list, such as EYAS_{name.upper()}='["…", "…"]'"""
        found.append(f"EYAS_{name.upper()} cannot be used: {text}")
    return found


def missing_paths(settings: Settings) -> list[str]:
    """One warning for each path of the settings that will be wanted and is not there."""
    found = [f"the root {root} does not exist" for root in settings.roots if not root.is_dir()]
    if not os.access(settings.worker_python, os.X_OK):
        found.append(f"EYAS_WORKER_PYTHON {settings.worker_python} is no program: no job can start")
    return found


def unknown_variables() -> list[str]:
    """One warning for each variable that means nothing here."""
    known = {f"EYAS_{name.upper()}" for name in Settings.model_fields} | _OTHERS
    warnings = []
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        warnings.append("CUDA_VISIBLE_DEVICES does not restrict the jobs; EYAS_GPUS does")
    for name in sorted(os.environ):
        if name.startswith("EYAS_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            warnings.append(f"{name} is not a setting" + (f"; did you mean {near[0]}?" if near else ""))
    return warnings


_SECRET_NAME = re.compile(
    r"TOKEN(?![A-Z])|SECRET|PASSW|PASSPHRASE|APIKEY|CREDENTIAL|(?:^|_)(?:KEY|PASS|PAT)(?:_|$)", re.IGNORECASE
)


def secret_values(named: tuple[str, ...] = ()) -> list[str]:
    """What must not be shown of the environment: values of variables that are named like a secret, or in `named`, and
    passwords in URLs. Jobs inherit them, and may print them.
    """
    found = []
    for name, value in os.environ.items():
        if name in named or (_SECRET_NAME.search(name) and not _is_path(value)):
            found.append(value)
        elif "://" in value and "@" in value:
            found += _passwords(value)
    return found


def unprotected_variables(named: tuple[str, ...], shortest: int) -> list[str]:
    """One warning for each variable named as secret whose value cannot be recognised."""
    values = {name: os.environ.get(name) for name in named}
    return [
        f"{name} in EYAS_SECRET_VARIABLES is " + ("not set" if value is None else f"shorter than {shortest} characters")
        for name, value in values.items()
        if value is None or len(value) < shortest
    ]


def _is_path(value: str) -> bool:
    """Whether a value only says where a secret lies."""
    return value.startswith("/") and Path(value).exists()


def _passwords(url: str) -> list[str]:
    try:
        password = urlsplit(url).password
    except ValueError:
        return []
    return [] if password is None else [password, unquote(password)]


def worker_environment(
    job_id: str, lock_fd: int, max_seconds: float | None = None, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a job: the daemon's own without its settings, the job's mark, how long it may take, and
    what it was `given` to use.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EYAS_")}
    own = {JOB_ID_VARIABLE: job_id, LOCK_FD_VARIABLE: str(lock_fd), "PYTHONUNBUFFERED": "1"}
    if max_seconds is not None:
        own[MAX_SECONDS_VARIABLE] = repr(max_seconds)
    return {**inherited, **(given or {}), **own}
