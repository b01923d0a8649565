"""A typed client of the daemon's HTTP API.

client = EyasClient.of_state(Path("~/.local/state/eyas"))
[job] = client.submit({"stage": "validate", "params": {...}})
print(client.job(job["id"])["summary"])
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self, TypedDict, cast
from urllib.parse import quote, urlencode

import httpx

DEFAULT_STATE = Path("~/.local/state/eyas")
IN_FLIGHT_TRIES, IN_FLIGHT_PAUSE_S = 120, 0.25
Body = dict[str, Any] | bytes | None
ENDED = frozenset({"succeeded", "failed", "cancelled"})


class SubmittedJob(TypedDict):
    """A job that was stored."""

    id: str
    name: str
    state: str


class LastCheckpoint(TypedDict):
    """The newest checkpoint of a job."""

    path: str
    verdict: str | None


class JobRow(TypedDict):
    """A job in the list; see docs/api.md for the fields."""

    id: str
    name: str
    stage: str
    state: str
    reason: str | None
    cause: str | None
    health: str | None
    waiting: str | None
    priority: int
    labels: dict[str, str]
    pipeline: dict[str, str] | None
    resources: dict[str, Any]
    gpus: list[dict[str, Any]]
    phase: str | None
    epoch: int | None
    epochs: int | None
    step: int | None
    steps: int | None
    loss: float | None
    eta_s: float | None
    elapsed_s: float | None
    last_checkpoint: LastCheckpoint | None
    warnings_total: int
    summary: str
    created_at: str
    started_at: str | None
    ended_at: str | None


class JobView(JobRow):
    """Everything about one job; see docs/api.md for the fields."""

    hint: str | None
    accuracy: list[float | None] | None
    lr: float | None
    tokens_per_s: float | None
    unit: str | None
    epochs_done: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    warnings_left_out: int
    result: dict[str, Any] | None
    setup: list[dict[str, Any]]
    params: dict[str, Any]
    output_dir: str
    depends_on: list[str]
    retry: dict[str, Any]
    max_seconds: float | None
    on_stall: str
    attempt: int | None
    pause_asked_at: str | None
    cancel_asked_at: str | None
    last_seq: int
    last_event_at: str | None
    version: int


class JobPage(TypedDict):
    """A page of the list."""

    jobs: list[JobRow]
    next_cursor: str | None


class AttemptRow(TypedDict):
    """One process life; see docs/api.md for the fields."""

    number: int
    state: str
    reason: str | None
    cause: str | None
    stop_for: str | None
    created_at: str
    started_at: str | None
    stop_asked_at: str | None
    ended_at: str | None
    gpus: list[dict[str, Any]]
    exit: dict[str, Any] | None
    log_bytes: int | None


class Removal(TypedDict):
    """What deleting a job removes, or has removed."""

    id: str
    deleted: bool
    paths: list[str]
    kept: list[str]
    bytes: int
    confirm: str | None


class Pipeline(TypedDict):
    """A pipeline; its state follows from its jobs."""

    id: str
    name: str
    state: str
    jobs_total: int
    jobs_done: int
    summary: str
    created_at: str
    started_at: str | None
    ended_at: str | None
    jobs: list[JobRow]


class LogPart(NamedTuple):
    """Bytes of a log and where to read on."""

    data: bytes
    next_offset: int
    size: int


class ApiError(Exception):
    """The daemon refused; `problem` is its RFC 9457 answer."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        detail = problem.get("detail") or problem.get("title") or f"HTTP {status}"
        super().__init__(str(detail))
        self.status = status
        self.problem = problem

    @property
    def fields(self) -> list[dict[str, Any]]:
        """The faulty fields: pointer, message, suggestion."""
        return cast("list[dict[str, Any]]", self.problem.get("errors", []))


class Unreachable(Exception):
    """No daemon answers."""


class EyasClient:
    """Talks to one daemon. Use it in a `with` block, or close it."""

    def __init__(self, url: str, token: str, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=timeout_s, trust_env=False
        )

    @classmethod
    def of_state(cls, state: Path) -> "EyasClient":
        """The daemon that uses a state directory on this host.

        Raises:
            Unreachable: none runs there.
        """
        state = state.expanduser()
        try:
            address = json.loads((state / "daemon.json").read_bytes())
            token = (state / "token").read_text().strip()
        except FileNotFoundError:
            raise Unreachable(f"no daemon runs on {state}; start one with `eyas serve`") from None
        return cls(address["url"], token)

    @classmethod
    def of_environment(cls, state: Path | None) -> "EyasClient":
        """The daemon at EYAS_URL with EYAS_TOKEN; else of `state`, of EYAS_STATE, or of the usual place."""
        url, token = os.environ.get("EYAS_URL"), os.environ.get("EYAS_TOKEN")
        if state is None and url and token:
            return cls(url, token)
        return cls.of_state(state or Path(os.environ.get("EYAS_STATE", DEFAULT_STATE)))

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def submit(self, request: dict[str, Any], key: str | None = None) -> list[SubmittedJob]:
        """Store a job, or a chain {"jobs": [...]}; with a `key` it may be repeated and is stored once."""
        return cast("list[SubmittedJob]", self._keyed("/jobs", request, key)["jobs"])

    def dry_run(self, request: dict[str, Any] | bytes) -> dict[str, Any]:
        """What a job, a chain or a pipeline (a dict with "stages", or YAML) would become; nothing is stored."""
        pipeline = isinstance(request, bytes) or "stages" in request
        return self._json("POST", f"/{'pipelines' if pipeline else 'jobs'}?dry_run=true", request)

    def submit_pipeline(self, document: dict[str, Any] | bytes, key: str | None = None) -> Pipeline:
        """Store a whole chain, from a dict or YAML; with a `key` it may be repeated and is stored once."""
        return cast("Pipeline", self._keyed("/pipelines", document, key))

    def pipeline(self, pipeline_id: str) -> Pipeline:
        """A pipeline with its jobs."""
        return cast("Pipeline", self._json("GET", f"/pipelines/{pipeline_id}"))

    def pipelines(self, limit: int = 20, cursor: str | None = None) -> dict[str, Any]:
        """Pipelines, newest first: {"pipelines", "next_cursor"}."""
        return self._json("GET", f"/pipelines?{_query(limit=limit, cursor=cursor)}")

    def cancel_pipeline(self, pipeline_id: str, grace_s: float | None = None, checkpoint: bool = True) -> Pipeline:
        """Have every job of a pipeline stopped that has not ended."""
        body = {"grace_s": grace_s, "checkpoint": checkpoint}
        return cast("Pipeline", self._json("POST", f"/pipelines/{pipeline_id}/cancel", body))

    def jobs(self, limit: int = 100, **wanted: Any) -> list[JobRow]:
        """The newest jobs that are meant, newest first; `wanted` as of `job_page`."""
        return self.job_page(limit, **wanted)["jobs"]

    def job_page(
        self,
        limit: int = 100,
        cursor: str | None = None,
        *,
        state: Sequence[str] = (),
        stage: Sequence[str] = (),
        name: Sequence[str] = (),
        label: Sequence[str] = (),
        since: str | None = None,
        pipeline: str | None = None,
    ) -> JobPage:
        """A page of jobs, newest first.

        Args:
            limit: jobs on it.
            cursor: `next_cursor` of the page before.
            state: any of these, as the next two.
            stage: kind of work.
            name: as it was submitted.
            label: `key=value`, or `key` for any value; several keys must all hold.
            since: submitted then or later, RFC 3339.
            pipeline: id of the pipeline they were submitted with.
        """
        asked = _query(
            limit=limit, cursor=cursor, state=state, stage=stage, name=name, label=label, since=since, pipeline=pipeline
        )
        return cast("JobPage", self._json("GET", f"/jobs?{asked}"))

    def job(self, job_id: str) -> JobView:
        """Everything about one job."""
        return cast("JobView", self._json("GET", f"/jobs/{job_id}"))

    def log(self, job_id: str, offset: int = 0, limit: int = 1 << 20) -> LogPart:
        """Bytes of the newest attempt's log."""
        answer = self._send("GET", f"/jobs/{job_id}/log?offset={offset}&limit={limit}")
        return LogPart(answer.content, int(answer.headers["X-Next-Offset"]), int(answer.headers["X-Log-Size"]))

    def events(self, job_id: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """The events behind a sequence number, up to now."""
        while True:
            page = self._json("GET", f"/jobs/{job_id}/events?after={after}")
            yield from page["events"]
            if not page["events"]:
                return
            after = page["next_after"]

    def metrics(
        self, job_id: str, names: Sequence[str] | None = None, max_points: int = 500, since: float = 0.0
    ) -> dict[str, Any]:
        """Samples and training metrics over time: {"names", "series": {name: {"points": [[unix time, value]]}}}."""
        asked: dict[str, str | float] = {"max_points": max_points, "since": since}
        if names is not None:
            asked["names"] = ",".join(names)
        return self._json("GET", f"/jobs/{job_id}/metrics?{urlencode(asked)}")

    def gpus(self) -> dict[str, Any]:
        """The GPUs of the host and who holds them."""
        return self._json("GET", "/gpus")

    def host(self) -> dict[str, Any]:
        """CPU, memory, disks and network of the host."""
        return self._json("GET", "/host")

    def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        """Checkpoints with their verdicts, oldest first."""
        return cast("list[dict[str, Any]]", self._json("GET", f"/jobs/{job_id}/checkpoints")["checkpoints"])

    def attempts(self, job_id: str) -> list[AttemptRow]:
        """Each process life of a job with its end, oldest first."""
        return cast("list[AttemptRow]", self._json("GET", f"/jobs/{job_id}/attempts")["attempts"])

    def artifacts(self, job_id: str) -> dict[str, Any]:
        """The files in a job's output directory: {"output_dir", "artifacts", "total_bytes", "truncated"}."""
        return self._json("GET", f"/jobs/{job_id}/artifacts")

    def download(self, job_id: str, path: str, to: BinaryIO) -> int:
        """Write a file of the output directory to `to`, a part at a time; returns its size in bytes.

        Raises:
            ApiError: the daemon refused.
            Unreachable: the connection broke before the end.
        """
        size = 0
        try:
            with self._http.stream("GET", f"/jobs/{job_id}/artifacts/{quote(path)}") as answer:
                if not answer.is_success:
                    answer.read()
                    raise _refusal(answer)
                for part in answer.iter_bytes():
                    size += to.write(part)
        except httpx.TransportError as error:
            raise Unreachable(f"{self.url} does not answer: {error}") from error
        return size

    def retry(self, job_id: str) -> dict[str, Any]:
        """Give a job that failed or was cancelled another attempt."""
        return self._json("POST", f"/jobs/{job_id}/retry")

    def delete(self, job_id: str, outputs: bool = False, confirm: str | None = None) -> Removal:
        """What deleting an ended job would remove; with the `confirm` of that answer, it is removed."""
        asked = _query(outputs="true" if outputs else "false", confirm=confirm)
        return cast("Removal", self._json("DELETE", f"/jobs/{job_id}?{asked}"))

    def stats(self, days: float = 7.0) -> dict[str, Any]:
        """All jobs in numbers."""
        return self._json("GET", f"/stats?days={days}")

    def cancel(self, job_id: str, grace_s: float | None = None, checkpoint: bool = True) -> dict[str, Any]:
        """Have a job stopped; a training saves first unless `checkpoint` is false."""
        return self._json("POST", f"/jobs/{job_id}/cancel", {"grace_s": grace_s, "checkpoint": checkpoint})

    def pause(self, job_id: str, grace_s: float | None = None) -> dict[str, Any]:
        """Have a job stopped until it is resumed."""
        return self._json("POST", f"/jobs/{job_id}/pause", {"grace_s": grace_s})

    def resume(self, job_id: str) -> dict[str, Any]:
        """Have a paused job go on."""
        return self._json("POST", f"/jobs/{job_id}/resume")

    def checkpoint_now(self, job_id: str) -> dict[str, Any]:
        """Have a running training save."""
        return self._json("POST", f"/jobs/{job_id}/checkpoint")

    def stack(self, job_id: str) -> str:
        """Stacks of every thread of a running job's processes."""
        return self._send("GET", f"/jobs/{job_id}/stack").text

    def login_link(self) -> str:
        """An address that signs a browser in, once."""
        return cast("str", self._json("POST", "/login-links")["url"])

    def create_token(self, name: str, scope: str, days: float | None = None) -> dict[str, Any]:
        """A new token, with its secret, which is told this once; needs the scope admin."""
        return self._json("POST", "/tokens", {"name": name, "scope": scope, "days": days})

    def tokens(self) -> list[dict[str, Any]]:
        """Every token but the owner's, without secrets."""
        return cast("list[dict[str, Any]]", self._json("GET", "/tokens")["tokens"])

    def revoke_token(self, name: str) -> dict[str, Any]:
        """Have a token, and the browser sessions it began, accepted no more."""
        return self._json("DELETE", f"/tokens/{name}")

    def audit(self, limit: int = 100, cursor: int | None = None) -> dict[str, Any]:
        """Who wrote what and who was refused, newest first: {"entries", "next_cursor"}."""
        return self._json("GET", f"/audit?limit={limit}" + ("" if cursor is None else f"&cursor={cursor}"))

    def health(self) -> dict[str, Any]:
        """Whether the daemon works."""
        return self._json("GET", "/healthz")

    def _json(self, method: str, path: str, body: Body = None) -> dict[str, Any]:
        return cast("dict[str, Any]", self._send(method, path, body).json())

    def _keyed(self, path: str, body: dict[str, Any] | bytes, key: str | None) -> dict[str, Any]:
        """Post; while an earlier request with the key is being carried out, ask again."""
        headers = None if key is None else {"Idempotency-Key": key}
        for _ in range(IN_FLIGHT_TRIES):
            try:
                return cast("dict[str, Any]", self._send("POST", path, body, headers).json())
            except ApiError as error:
                if not error.problem.get("type", "").endswith(":request-in-flight"):
                    raise
                last = error
            time.sleep(IN_FLIGHT_PAUSE_S)
        raise last

    def _send(self, method: str, path: str, body: Body = None, headers: dict[str, str] | None = None) -> httpx.Response:
        """Ask; a body that is bytes is YAML.

        Raises:
            ApiError: the daemon refused.
            Unreachable: nobody listens, or the connection broke.
        """
        try:
            if isinstance(body, bytes):
                headers = {**(headers or {}), "Content-Type": "application/yaml"}
                answer = self._http.request(method, path, content=body, headers=headers)
            else:
                answer = self._http.request(method, path, json=body, headers=headers)
        except httpx.TransportError as error:
            raise Unreachable(f"{self.url} does not answer: {error}") from error
        if answer.is_success:
            return answer
        raise _refusal(answer)


def _refusal(answer: httpx.Response) -> ApiError:
    try:
        problem = answer.json()
    except ValueError:
        problem = {"detail": answer.text[:500]}
    return ApiError(answer.status_code, problem)


def _query(**asked: str | float | Sequence[str] | None) -> str:
    """Parameters that are not None, those with several values repeated."""
    return urlencode({name: value for name, value in asked.items() if value is not None}, doseq=True)
