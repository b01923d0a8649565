"""The `eyas` command."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from client.access import audit_line, token_line
from client.console import Cursor, Json, Limit, State, connected, fail, note, show_json, tell_of_more
from client.data_store import data_app
from client.job_text import job_text
from client.outcomes import register, show_dry_run, show_pipeline
from client.views import ENDED
from eagle3_core.contract.durations import parse_duration
from eagle3_core.contract.plain import plain
from eagle3_core.contract.priority import be_nice

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they may hold the token
)
checkpoint_app = typer.Typer(help="Checkpoints, without a daemon.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(data_app, name="data")
token_app = typer.Typer(help="Tokens besides the owner's.", no_args_is_help=True)
app.add_typer(token_app, name="token")

register(app)

TIME_OVER = 124
"""Exit status when a wait was not met in time, as that of timeout(1)."""

NOT_WAITED = 125
"""Exit status when the daemon could not be asked, or refused: nothing follows of the job. Also as timeout(1)."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("eyas"))
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Trains EAGLE-3 drafters as watched jobs."""


@app.command()
def serve(
    state: State = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one")] = None,
    root: Annotated[list[Path] | None, typer.Option(help="further directory jobs may use; can be repeated")] = None,
) -> None:
    """Run the daemon. Jobs may use the state directory, the directory it is started in, and every --root."""
    from pydantic import ValidationError

    from server.app import serve as run
    from server.errors import StartupError
    from server.settings import Settings, faults_of

    given = {"state": state, "host": host, "port": port}
    try:
        settings = Settings.model_validate({name: value for name, value in given.items() if value is not None})
        roots = (Path.cwd(), *settings.roots, *(root or ()))
        run(Settings.model_validate({**settings.model_dump(), "roots": roots}))
    except ValidationError as error:
        raise fail("; ".join(faults_of(error))) from None
    except StartupError as error:
        raise fail(str(error)) from None


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="a job, chain or pipeline; JSON, a pipeline also YAML; - reads stdin")],
    state: State = None,
    as_json: Json = False,
    key: Annotated[str | None, typer.Option(help="repeating the command with it stores nothing twice")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="store nothing; show what would be stored")] = False,
) -> None:
    """Submit a job, a chain of jobs or a pipeline."""
    request = _read_request(file)
    with connected(state) as client:
        if dry_run:
            answer = client.dry_run(request)
            if as_json:
                show_json(answer)
            else:
                show_dry_run(answer)
            return
        if isinstance(request, bytes) or "stages" in request:
            pipeline = client.submit_pipeline(request, key)
            if as_json:
                show_json(pipeline)
            else:
                show_pipeline(pipeline)
            return
        jobs = client.submit(request, key)
    if as_json:
        show_json({"jobs": jobs})
        return
    for job in jobs:
        typer.echo(f"{job['id']}  {job['name']}  {job['state']}")


def _read_request(file: Path) -> dict[str, Any] | bytes:
    """JSON as what it stands for; YAML, which the daemon reads, as its bytes."""
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        if file.suffix in (".yaml", ".yml") or (str(file) == "-" and not data.lstrip().startswith((b"{", b"["))):
            return data
        request = json.loads(data)
    except OSError as error:
        raise fail(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise fail(f"{file}: not JSON: {error}") from None
    if not isinstance(request, dict):
        raise fail(f"{file}: not an object")
    return request


@app.command()
def jobs(
    state_dir: State = None,
    limit: Limit = 20,
    cursor: Cursor = None,
    as_json: Json = False,
    in_state: Annotated[list[str] | None, typer.Option("--in", help="in this state; can be repeated")] = None,
    stage: Annotated[list[str] | None, typer.Option(help="of this stage; can be repeated")] = None,
    name: Annotated[list[str] | None, typer.Option(help="of this name; can be repeated")] = None,
    label: Annotated[list[str] | None, typer.Option(help="with key=value, or with the key; can be repeated")] = None,
    since: Annotated[str | None, typer.Option(help="submitted then or later, such as 2026-05-01T12:00:00Z")] = None,
    pipeline: Annotated[str | None, typer.Option(help="of this pipeline")] = None,
) -> None:
    """List the newest jobs, newest first."""
    with connected(state_dir) as client:
        page = client.job_page(
            limit,
            cursor,
            state=in_state or (),
            stage=stage or (),
            name=name or (),
            label=label or (),
            since=since,
            pipeline=pipeline,
        )
    if as_json:
        show_json(page)
        return
    for job in page["jobs"]:
        typer.echo(plain(f"{job['id']}  {job['name']:<20}  {job['stage']:<9}  {job['summary']}"))
    tell_of_more(page)


@app.command()
def job(
    job_id: str,
    state: State = None,
    as_json: Json = False,
    wait: Annotated[bool, typer.Option("--wait", help="show it once something has changed, or it has ended")] = False,
) -> None:
    """Show one job."""
    with connected(state) as client:
        found = client.wait(job_id, "change").job if wait else client.job(job_id)
    if as_json:
        show_json(found)
        return
    typer.echo(job_text(found))


@app.command("wait")
def wait_for_job(
    job_id: str,
    state: State = None,
    until: Annotated[
        str, typer.Option(help="change, progress, epoch, checkpoint (written or judged) or terminal")
    ] = "terminal",
    timeout: Annotated[str | None, typer.Option(help="such as 90, 30m, 2h; without it, as long as it takes")] = None,
    as_json: Json = False,
) -> None:
    """Wait for a job: exit status 0 when it came to that, 1 when it ended without success, 124 when time is over, 125
    when the daemon could not be asked.
    """
    try:
        seconds = None if timeout is None else parse_duration(timeout)
    except ValueError as error:
        raise fail(f"--timeout: {error}", NOT_WAITED) from None
    with connected(state, NOT_WAITED) as client:
        found, outcome = client.wait(job_id, until, timeout_s=seconds)
    if as_json:
        show_json(found)
    else:
        typer.echo(plain(f"{found['id']}  {found['name']}  {found['summary']}"))
    if outcome == "timeout":
        raise typer.Exit(TIME_OVER)
    if outcome == "ended" and found["state"] != "succeeded":
        raise typer.Exit(1)


@app.command()
def log(
    job_id: str,
    state: State = None,
    offset: Annotated[int, typer.Option(help="byte to begin at")] = 0,
    tail: Annotated[int | None, typer.Option(help="begin at the last so many lines instead")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on to the end of the job")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="no colours, of progress bars the last drawing")] = False,
) -> None:
    """Print the log of a job as far as it goes, or follow it."""
    out = sys.stdout.buffer
    view = "clean" if clean else "raw"
    with connected(state) as client:
        attempt = None
        if tail is not None:
            part = client.tail(job_id, tail, view)
            out.write(part.data)
            attempt, offset = part.attempt or None, part.next_offset
        if follow:
            for data in client.follow_log(job_id, offset, attempt, view):
                out.write(data)
                out.flush()
        elif tail is None:
            while (part := client.log(job_id, offset, attempt=attempt, view=view)).next_offset > offset:
                out.write(part.data)
                attempt, offset = part.attempt, part.next_offset
        if not follow and not part.attempt:
            note(f"job {job_id} has no log yet: {client.job(job_id)['summary']}")
    out.flush()


@app.command()
def cancel(
    job_id: Annotated[str | None, typer.Argument(show_default=False)] = None,
    state: State = None,
    grace: Annotated[float | None, typer.Option(min=0, help="seconds before it is killed")] = None,
    checkpoint: Annotated[bool, typer.Option(help="a training saves before it stops")] = True,
    local: Annotated[Path | None, typer.Option(help="job directory; works while the daemon is down")] = None,
) -> None:
    """Stop a job."""
    if (job_id is None) == (local is None):
        raise fail("name a job, or its directory with --local")
    if local is not None:
        _cancel_local(local, grace, checkpoint)
        return
    with connected(state) as client:
        answer = client.cancel(str(job_id), grace, checkpoint)
    typer.echo(f"{answer['id']}  {_asked(answer['state'], 'cancel')}")


def _asked(state: str, what: str) -> str:
    """The state, and that something was asked for which it does not show yet."""
    return state if state in ENDED or state == "paused" else f"{state}, {what} asked"


def _cancel_local(directory: Path, grace: float | None, checkpoint: bool) -> None:
    """Write the order a running shim looks for, and a daemon that starts later."""
    from eagle3_core.contract.exits import DEFAULT_GRACE_S
    from eagle3_core.contract.jobdir import JobDir, write_json

    job = JobDir(directory)
    if not job.spec.is_file():
        raise fail(f"{directory} is not a job directory: it holds no {job.spec.name}")
    try:
        write_json(job.cancel, {"grace_s": DEFAULT_GRACE_S if grace is None else grace, "checkpoint": checkpoint})
    except OSError as error:
        raise fail(f"{job.cancel} cannot be written: {error}") from None
    typer.echo(f"{job.path.absolute().name}  cancel asked in {job.cancel}")


@app.command()
def pause(
    job_id: str,
    state: State = None,
    grace: Annotated[float | None, typer.Option(min=0, help="seconds before it is killed")] = None,
) -> None:
    """Stop a job, a training with a checkpoint, until it is resumed."""
    with connected(state) as client:
        answer = client.pause(job_id, grace)
    typer.echo(f"{answer['id']}  {_asked(answer['state'], 'pause')}")


@app.command()
def resume(job_id: str, state: State = None) -> None:
    """Have a paused job go on."""
    with connected(state) as client:
        answer = client.resume(job_id)
    typer.echo(f"{answer['id']}  {answer['state']}, resume asked")


@app.command("checkpoint-now")
def checkpoint_now(job_id: str, state: State = None) -> None:
    """Have a running training save and judge a checkpoint at its next step."""
    with connected(state) as client:
        answer = client.checkpoint_now(job_id)
    typer.echo(f"{answer['id']}  asked ({answer['request']})")


@app.command()
def stack(job_id: str, state: State = None) -> None:
    """Print the stacks of every thread of a running job's processes."""
    with connected(state) as client:
        typer.echo(client.stack(job_id), nl=False)


@app.command()
def adopt(
    pid: Annotated[int, typer.Option(min=1, help="process to watch")],
    state: State = None,
    log_file: Annotated[Path | None, typer.Option("--log", help="its log; default: the file its stdout is")] = None,
    watch: Annotated[Path | None, typer.Option(help="directory whose checkpoints are judged")] = None,
    progress: Annotated[str, typer.Option(help="format of the log; see `eyas stages`")] = "auto",
    regex: Annotated[str | None, typer.Option(help="an expression with named groups instead")] = None,
    name: Annotated[str | None, typer.Option(help="of the job; default: adopt")] = None,
    as_json: Json = False,
) -> None:
    """Watch a process somebody started, to its end. It stays theirs: it is never signalled."""
    params: dict[str, Any] = {"pid": pid, "progress": progress if regex is None else {"regex": regex}}
    params |= {key: str(path.absolute()) for key, path in (("log", log_file), ("watch", watch)) if path is not None}
    request: dict[str, Any] = {"stage": "adopt", "params": params}
    with connected(state) as client:
        [job] = client.submit(request if name is None else {**request, "name": name})
    if as_json:
        show_json(job)
        return
    typer.echo(f"{job['id']}  {job['name']}  {job['state']}")


@app.command()
def stages() -> None:
    """List the stages and their parameters, as Markdown."""
    from client.stages import markdown

    typer.echo(markdown(), nl=False)


@app.command()
def openapi() -> None:
    """Print the OpenAPI document of the daemon's API."""
    from server.api.openapi import text_of
    from server.app import routed

    typer.echo(text_of(routed()), nl=False)


@app.command()
def login(state: State = None) -> None:
    """Print a link that signs a browser in, once."""
    with connected(state) as client:
        typer.echo(client.login_link())


@app.command()
def backup(
    to: Annotated[Path, typer.Argument(help="directory to make; a daemon may run meanwhile")], state: State = None
) -> None:
    """Copy the database and the settings. Job directories and their outputs are files: back them up as such."""
    from client.host import backup as run

    run(state, to)


@app.command()
def rebuild(state: State = None) -> None:
    """Make the database anew from the job directories, with the daemon stopped; running jobs go on."""
    from client.host import rebuild as run

    raise typer.Exit(run(state))


@app.command()
def doctor(state: State = None, as_json: Json = False) -> None:
    """Examine host, database and worker environment: exit status 1 when something will not work."""
    from client.host import doctor as run

    raise typer.Exit(run(state, as_json))


@token_app.command()
def create(
    name: Annotated[str, typer.Argument(help="of a person or program; never used again")],
    scope: Annotated[str, typer.Option(help="read: look; submit: and act on jobs; admin: everything")],
    state: State = None,
    days: Annotated[float | None, typer.Option(min=0, help="life; without it, until it is revoked")] = None,
) -> None:
    """Print a new token, once: only its hash is kept."""
    with connected(state) as client:
        typer.echo(client.create_token(name, scope, days)["token"])


@token_app.command("list")
def list_tokens(state: State = None, as_json: Json = False) -> None:
    """List the tokens, also those that are over."""
    with connected(state) as client:
        tokens = client.tokens()
    if as_json:
        show_json({"tokens": tokens})
        return
    for token in tokens:
        typer.echo(token_line(token))


@token_app.command()
def revoke(name: str, state: State = None) -> None:
    """Accept a token, and the browser sessions it began, no more."""
    with connected(state) as client:
        client.revoke_token(name)
    typer.echo(f"{name}  revoked")


@app.command()
def audit(state: State = None, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """Show who wrote what, and who was refused, newest first."""
    with connected(state) as client:
        page = client.audit(limit, cursor)
    if as_json:
        show_json(page)
        return
    for entry in page["entries"]:
        typer.echo(audit_line(entry))
    tell_of_more(page)


@checkpoint_app.command()
def verify(
    path: Annotated[Path, typer.Argument(readable=False, help="checkpoint directory")],
    as_json: Json = False,
    form: Annotated[Literal["text", "json", "sarif"], typer.Option("--format")] = "text",
    level: Annotated[
        Literal["quick", "full", "deep"],
        typer.Option(help="quick: headers, names, shapes, config; full: every byte; deep: a forward pass"),
    ] = "full",
    previous: Annotated[Path | None, typer.Option(help="checkpoint of the epoch before, which must differ")] = None,
    verifier: Annotated[Path | None, typer.Option(help="verifier directory to compare with")] = None,
    store: Annotated[Path | None, typer.Option(help="hidden-state store, for --level deep")] = None,
    servers: Annotated[bool, typer.Option("--servers", help="what each server would do with it")] = False,
    max_mb_per_s: Annotated[float | None, typer.Option(min=1, help="read no faster than that")] = None,
) -> None:
    """Judge a checkpoint: exit status 0 valid, 1 suspect, 2 invalid, 3 unreadable, 4 options that do not fit."""
    from client.checkpoint import MISUSED, misuse
    from client.checkpoint import verify as judge

    if fault := misuse(level, previous, verifier, store, max_mb_per_s):
        typer.echo(f"eyas: {fault}", err=True)
        raise typer.Exit(MISUSED)
    if level != "quick":
        be_nice()  # a training beside it goes first
    raise typer.Exit(
        judge(
            path,
            "json" if as_json else form,
            level=level,
            previous=previous,
            verifier=verifier,
            store=store,
            servers=servers,
            max_mb_per_s=max_mb_per_s,
        )
    )


@checkpoint_app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="checkpoint directory of any format")],
    destination: Annotated[Path, typer.Argument(help="directory to write; absent or empty")],
    to: Annotated[
        Literal["speculators", "vllm", "sglang", "eagle", "both"],
        typer.Option(help="speculators; vllm: HF style; sglang; eagle: the official module; both: vLLM and SGLang"),
    ],
    verifier: Annotated[
        Path | None, typer.Option(help="verifier directory: lends embedding and head, says what layer ids mean")
    ] = None,
    verifier_name: Annotated[str | None, typer.Option(help="path or hub id that servers are told")] = None,
    aux_layer_ids: Annotated[
        str | None, typer.Option(help="states it was trained on, such as 2,30,58, where the source does not say")
    ] = None,
    max_mb_per_s: Annotated[float | None, typer.Option(min=1, help="read no faster than that")] = None,
    as_json: Json = False,
) -> None:
    """Write a drafter in another format, and judge it: exit status 0 valid, 1 suspect, 2 refused, nothing written."""
    from client.convert import convert as write

    be_nice()
    raise typer.Exit(write(source, destination, to, verifier, verifier_name, aux_layer_ids, max_mb_per_s, as_json))


@checkpoint_app.command()
def diff(
    one: Annotated[Path, typer.Argument(help="checkpoint directory of any format")],
    other: Annotated[Path, typer.Argument(help="another one")],
    verifier: Annotated[Path | None, typer.Option(help="their verifier, for what they leave to it")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="largest difference of two values that counts as equal, as after rounding")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Compare what two checkpoints mean: exit status 0 the same, 1 not the same, 2 cannot be compared."""
    from client.convert import diff as compare

    be_nice()
    raise typer.Exit(compare(one, other, verifier, tolerance, as_json))


if __name__ == "__main__":
    app()
