"""A typed client of the daemon's HTTP API.

client = EyasClient.of_state(Path("~/.local/state/eyas"))
[job] = client.submit({"stage": "validate", "params": {...}})
print(client.job(job["id"])["summary"])
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, cast
from urllib.parse import quote, urlencode

import httpx

from client.errors import ApiError as ApiError
from client.errors import Unreachable as Unreachable
from client.following import FIRST_PAUSE_S, ServerSentEvent, again, parse_stream
from client.views import (
    ENDED,
    AttemptRow,
    JobPage,
    JobRow,
    JobView,
    LogPart,
    Pipeline,
    Removal,
    SubmittedJob,
    Waited,
)

DEFAULT_STATE = Path("~/.local/state/eyas")
WAIT_S = 50.0
"""Seconds of one long poll: many proxies cut a connection that says nothing for a minute."""

Body = dict[str, Any] | bytes | None

SILENT_S = 60.0
"""Seconds after which a stream without even a heartbeat counts as broken."""

SUBMIT_S = 30.0
"""Seconds for which a submit with a key is repeated."""

NO_CONTENT = 204
T = TypeVar("T")


class EyasClient:
    """Talks to one daemon. Use it in a `with` block, or close it.

    Waiting, following and submitting with a key go on over lost answers, broken connections and restarts of the daemon.
    """

    def __init__(self, url: str, token: str, timeout_s: float = 30.0, patience_s: float = 300.0) -> None:
        """A client of the daemon at a URL.

        Args:
            url: where it listens.
            token: what it asks for.
            timeout_s: seconds an answer may take, beyond those it was asked to wait.
            patience_s: seconds without any answer after which waiting and following give up.
        """
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._state: Path | None = None
        self.on_trouble: Callable[[str], None] | None = None
        """Called once for each time that no answer comes and the client asks again."""
        self._http = _http_client(self.url, token, timeout_s)

    @classmethod
    def of_state(cls, state: Path) -> "EyasClient":
        """The daemon that uses a state directory on this host.

        Raises:
            Unreachable: none runs there.
        """
        state = state.expanduser()
        client = cls(*_address(state))
        client._state = state
        return client

    @classmethod
    def of_environment(cls, state: Path | None) -> "EyasClient":
        """The daemon of `state`; else at EYAS_URL with EYAS_TOKEN; else of EYAS_STATE, or of the usual place.

        Raises:
            Unreachable: none runs there, or EYAS_URL comes without EYAS_TOKEN.
        """
        url, token = os.environ.get("EYAS_URL"), os.environ.get("EYAS_TOKEN")
        if state is None and url:
            if not token:
                raise Unreachable("EYAS_URL is set and EYAS_TOKEN is not: the token is in the daemon's state directory")
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
        """Store a job, or a chain {"jobs": [...]}; with a `key` it is stored once, and sent until it is answered."""
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
        return cast("Pipeline", self._json("GET", f"/pipelines/{_part(pipeline_id)}"))

    def pipelines(self, limit: int = 20, cursor: str | None = None) -> dict[str, Any]:
        """Pipelines, newest first: {"pipelines", "next_cursor"}."""
        return self._json("GET", f"/pipelines?{_query(limit=limit, cursor=cursor)}")

    def cancel_pipeline(self, pipeline_id: str, grace_s: float | None = None, checkpoint: bool = True) -> Pipeline:
        """Have every job of a pipeline stopped that has not ended."""
        body = {"grace_s": grace_s, "checkpoint": checkpoint}
        return cast("Pipeline", self._json("POST", f"/pipelines/{_part(pipeline_id)}/cancel", body))

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
        return cast("JobView", self._json("GET", f"/jobs/{_part(job_id)}"))

    def wait(
        self, job_id: str, until: str = "terminal", since: int | None = None, timeout_s: float | None = None
    ) -> Waited:
        """The job once there is news of it, it has ended, or the time is over.

        Args:
            job_id: of the job.
            until: `change`, `progress`, `epoch`, `checkpoint` or `terminal`.
            since: the `version` of the job that is known; default: as it is when this is called.
            timeout_s: seconds at most; default: no end.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        if since is None:
            since = self._again(partial(self.job, job_id))["version"]
        while True:
            left = WAIT_S if end is None else min(WAIT_S, max(0.0, end - time.monotonic()))
            path = f"/jobs/{_part(job_id)}?wait={left:.3f}&until={until}&since={since}"
            answer = self._again(partial(self._send, "GET", path, waits_s=left))
            outcome = answer.headers["X-Wait"]
            if outcome != "timeout" or (end is not None and time.monotonic() >= end):
                return Waited(cast("JobView", answer.json()), outcome)

    def log(
        self,
        job_id: str,
        offset: int = 0,
        limit: int = 1 << 20,
        attempt: int | None = None,
        wait_s: float = 0.0,
        view: str = "raw",
    ) -> LogPart:
        """Bytes of a log, of the newest attempt's unless one is named; with `wait_s`, once there are any."""
        asked: dict[str, str | float] = {"offset": offset, "limit": limit, "view": view}
        asked |= {} if attempt is None else {"attempt": attempt}
        asked |= {"wait": round(wait_s, 3)} if wait_s else {}
        return _log_part(self._send("GET", f"/jobs/{_part(job_id)}/log?{urlencode(asked)}", waits_s=wait_s))

    def tail(self, job_id: str, lines: int, view: str = "raw") -> LogPart:
        """The last lines of the newest attempt's log, 1 MiB at most."""
        return _log_part(self._send("GET", f"/jobs/{_part(job_id)}/log?tail={lines}&view={view}"))

    def follow_log(
        self, job_id: str, offset: int = 0, attempt: int | None = None, view: str = "raw"
    ) -> Iterator[bytes]:
        """The log from an offset, as it is written, over all attempts, to the end of the job: each byte once.

        Args:
            job_id: of the job.
            offset: byte to begin at.
            attempt: whose offset that is; default: the newest one's.
            view: `raw`, or `clean` for a person.
        """
        while True:
            part = self._again(partial(self.log, job_id, offset, attempt=attempt, wait_s=WAIT_S, view=view))
            if part.data:
                yield part.data
            attempt, offset = part.attempt or None, part.next_offset
            if not part.complete:
                continue
            job = self._until_another(job_id, attempt)
            if attempt is None or (job["attempt"] or 0) <= attempt:
                return
            attempt, offset = attempt + 1, 0

    def _until_another(self, job_id: str, attempt: int | None) -> JobView:
        """The job once it has an attempt behind this one, or has ended."""
        job = self._again(partial(self.job, job_id))
        while job["state"] not in ENDED and (job["attempt"] or 0) <= (attempt or 0):
            job = self.wait(job_id, "change", job["version"]).job
        return job

    def stream_events(self, job_id: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """The events behind a sequence number, as they come, to the end of the job: each once and in order."""
        last_id: str | None = None
        while True:
            answer = self._again(partial(self._open_stream, job_id, after, last_id))
            with closing(answer):
                if answer.status_code == NO_CONTENT:
                    return
                for one in _until_broken(answer):
                    last_id = one.id
                    if one.event == "end":
                        return
                    # A daemon with another database begins anew; the numbers are those of the job's own files.
                    if one.event == "" and (event := json.loads(one.data))["seq"] > after:
                        after = event["seq"]
                        yield event
            time.sleep(FIRST_PAUSE_S)

    def _open_stream(self, job_id: str, after: int, last_id: str | None) -> httpx.Response:
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        timeout = httpx.Timeout(self._timeout_s, read=SILENT_S)
        request = self._http.build_request(
            "GET", f"/jobs/{_part(job_id)}/events/stream?after={after}", headers=headers, timeout=timeout
        )
        return self._checked(lambda: self._http.send(request, stream=True))

    def events(self, job_id: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """The events behind a sequence number, up to now."""
        while True:
            page = self._json("GET", f"/jobs/{_part(job_id)}/events?after={after}")
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
        return self._json("GET", f"/jobs/{_part(job_id)}/metrics?{urlencode(asked)}")

    def gpus(self) -> dict[str, Any]:
        """The GPUs of the host and who holds them."""
        return self._json("GET", "/gpus")

    def host(self) -> dict[str, Any]:
        """CPU, memory, disks and network of the host."""
        return self._json("GET", "/host")

    def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        """Checkpoints with their verdicts, oldest first."""
        return cast("list[dict[str, Any]]", self._json("GET", f"/jobs/{_part(job_id)}/checkpoints")["checkpoints"])

    def attempts(self, job_id: str) -> list[AttemptRow]:
        """Each process life of a job with its end, oldest first."""
        return cast("list[AttemptRow]", self._json("GET", f"/jobs/{_part(job_id)}/attempts")["attempts"])

    def artifacts(self, job_id: str) -> dict[str, Any]:
        """The files in a job's output directory: {"output_dir", "artifacts", "total_bytes", "truncated"}."""
        return self._json("GET", f"/jobs/{_part(job_id)}/artifacts")

    def download(self, job_id: str, path: str, to: BinaryIO) -> int:
        """Write a file of the output directory to `to`, a part at a time; returns its size in bytes.

        Raises:
            ApiError: the daemon refused.
            Unreachable: the connection broke before the end.
        """
        size = 0
        try:
            with self._http.stream("GET", f"/jobs/{_part(job_id)}/artifacts/{quote(path)}") as answer:
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
        return self._json("POST", f"/jobs/{_part(job_id)}/retry")

    def delete(self, job_id: str, outputs: bool = False, confirm: str | None = None) -> Removal:
        """What deleting an ended job would remove; with the `confirm` of that answer, it is removed."""
        asked = _query(outputs="true" if outputs else "false", confirm=confirm)
        return cast("Removal", self._json("DELETE", f"/jobs/{_part(job_id)}?{asked}"))

    def stats(self, days: float = 7.0) -> dict[str, Any]:
        """All jobs in numbers."""
        return self._json("GET", f"/stats?days={days}")

    def cancel(self, job_id: str, grace_s: float | None = None, checkpoint: bool = True) -> dict[str, Any]:
        """Have a job stopped; a training saves first unless `checkpoint` is false."""
        return self._json("POST", f"/jobs/{_part(job_id)}/cancel", {"grace_s": grace_s, "checkpoint": checkpoint})

    def pause(self, job_id: str, grace_s: float | None = None) -> dict[str, Any]:
        """Have a job stopped until it is resumed."""
        return self._json("POST", f"/jobs/{_part(job_id)}/pause", {"grace_s": grace_s})

    def resume(self, job_id: str) -> dict[str, Any]:
        """Have a paused job go on."""
        return self._json("POST", f"/jobs/{_part(job_id)}/resume")

    def checkpoint_now(self, job_id: str) -> dict[str, Any]:
        """Have a running training save."""
        return self._json("POST", f"/jobs/{_part(job_id)}/checkpoint")

    def stack(self, job_id: str) -> str:
        """Stacks of every thread of a running job's processes."""
        return self._send("GET", f"/jobs/{_part(job_id)}/stack").text

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
        return self._json("DELETE", f"/tokens/{_part(name)}")

    def audit(self, limit: int = 100, cursor: int | str | None = None) -> dict[str, Any]:
        """Who wrote what and who was refused, newest first: {"entries", "next_cursor"}."""
        return self._json("GET", f"/audit?limit={limit}" + ("" if cursor is None else f"&cursor={cursor}"))

    def health(self) -> dict[str, Any]:
        """Whether the daemon works."""
        return self._json("GET", "/healthz")

    def _json(self, method: str, path: str, body: Body = None) -> dict[str, Any]:
        return cast("dict[str, Any]", self._send(method, path, body).json())

    def _keyed(self, path: str, body: dict[str, Any] | bytes, key: str | None) -> dict[str, Any]:
        """Post; with a key until it is answered."""
        if key is None:
            answer = self._send("POST", path, body)
        else:
            answer = self._again(partial(self._send, "POST", path, body, {"Idempotency-Key": key}), SUBMIT_S)
        return cast("dict[str, Any]", answer.json())

    def _again(self, ask: Callable[[], T], patience_s: float | None = None) -> T:
        patience = self._patience_s if patience_s is None else patience_s
        told = False

        def between(error: BaseException) -> None:
            nonlocal told
            if not told and self.on_trouble is not None:
                self.on_trouble(f"{error}; asking again for {patience:.0f} s")
            told = True
            self._look_again()

        return again(ask, patience, between)

    def _look_again(self) -> None:
        """A daemon that was started anew may listen on another port."""
        if self._state is None:
            return
        try:
            url, token = _address(self._state)
        except (Unreachable, OSError, ValueError):
            return  # not yet
        if url != self.url:
            self._http.close()
            self.url = url
            self._http = _http_client(url, token, self._timeout_s)

    def _send(
        self,
        method: str,
        path: str,
        body: Body = None,
        headers: dict[str, str] | None = None,
        waits_s: float = 0.0,
    ) -> httpx.Response:
        """Ask; a body that is bytes is YAML.

        Raises:
            ApiError: the daemon refused.
            Unreachable: nobody listens, or the connection broke.
        """
        timeout = self._timeout_s + waits_s
        if isinstance(body, bytes):
            yaml = {**(headers or {}), "Content-Type": "application/yaml"}
            return self._checked(lambda: self._http.request(method, path, content=body, headers=yaml, timeout=timeout))
        return self._checked(lambda: self._http.request(method, path, json=body, headers=headers, timeout=timeout))

    def _checked(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        try:
            answer = send()
            if answer.is_success:
                return answer
            answer.read()
        except httpx.TransportError as error:
            raise Unreachable(f"{self.url} does not answer: {error}") from error
        raise _refusal(answer)


def _refusal(answer: httpx.Response) -> ApiError:
    try:
        problem = answer.json()
    except ValueError:
        problem = {"detail": answer.text[:500]}
    return ApiError(answer.status_code, problem)


def _part(name: str) -> str:
    """An id or a name as one part of a path, whatever it holds."""
    return quote(name, safe="").replace(".", "%2E")


def _query(**asked: str | float | Sequence[str] | None) -> str:
    """Parameters that are not None, those with several values repeated."""
    return urlencode({name: value for name, value in asked.items() if value is not None}, doseq=True)


def _http_client(url: str, token: str, timeout_s: float) -> httpx.Client:
    headers = {"Authorization": f"Bearer {token}"}
    verify = not url.startswith("http:")  # reading certificates that are not needed takes longer than an answer
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False, verify=verify)
    except (httpx.InvalidURL, ValueError) as error:
        raise Unreachable(f"{url!r} is no address of a daemon such as http://127.0.0.1:8765: {error}") from None


def _address(state: Path) -> tuple[str, str]:
    """URL and token of the daemon that uses a state directory.

    Raises:
        Unreachable: none runs there.
    """
    try:
        address = json.loads((state / "daemon.json").read_bytes())
        token = (state / "token").read_text().strip()
    except FileNotFoundError:
        raise Unreachable(
            f"no daemon runs on {state}; start one with `eyas serve`, or name it by --state or EYAS_URL and EYAS_TOKEN"
        ) from None
    except (OSError, ValueError) as error:
        raise Unreachable(f"the daemon's address and token in {state} cannot be read: {error}") from None
    return str(address["url"]), token


def _log_part(answer: httpx.Response) -> LogPart:
    headers = answer.headers
    return LogPart(
        answer.content,
        int(headers["X-Next-Offset"]),
        int(headers["X-Log-Size"]),
        int(headers["X-Log-Attempt"]),
        headers["X-Log-Complete"] == "true",
    )


def _until_broken(answer: httpx.Response) -> Iterator[ServerSentEvent]:
    """The events of a stream, as long as it lasts."""
    try:
        yield from parse_stream(answer.iter_raw())
    except httpx.TransportError:
        return
