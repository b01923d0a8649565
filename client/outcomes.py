"""Commands for what came of jobs: attempts, artifacts, another attempt, removal, pipelines, numbers."""

from pathlib import Path
from typing import Annotated, Any

import typer

from client.console import Cursor, Json, Limit, State, connected, fail, show_json, tell_of_more
from client.views import Pipeline, Removal
from eagle3_core.contract.plain import plain

pipeline_app = typer.Typer(help="Pipelines: whole chains as one document; `eyas submit FILE.yaml` stores one.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (attempts, artifacts, retry, delete, stats):
        app.command()(command)
    app.add_typer(pipeline_app, name="pipeline", no_args_is_help=True)


def attempts(job_id: str, state: State = None, as_json: Json = False) -> None:
    """List the attempts of a job: each process life with its end."""
    with connected(state) as client:
        found = client.attempts(job_id)
    if as_json:
        show_json({"attempts": found})
        return
    for one in found:
        why = "" if one["reason"] is None else f"  {one['reason']}: {one['cause']}"
        log = "no log" if one["log_bytes"] is None else f"{one['log_bytes']} bytes of log"
        times = f"{one['started_at'] or '-'}  {one['ended_at'] or '-'}"
        typer.echo(plain(f"{one['number']:>3}  {one['state']:<8}  {times}  {log}{why}"))


def artifacts(
    job_id: str,
    path: Annotated[str | None, typer.Argument(help="file to fetch; without it, all are listed")] = None,
    to: Annotated[Path | None, typer.Option(help="file to write; default: the same name here")] = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """List the files a job has written, or fetch one."""
    with connected(state) as client:
        if path is None:
            found = client.artifacts(job_id)
            if as_json:
                show_json(found)
                return
            for one in found["artifacts"]:
                leads = "" if one["target"] is None else f" -> {one['target']}"
                typer.echo(plain(f"{one['bytes']:>14}  {one['role']:<14}  {one['path']}{leads}"))
            if found["truncated"]:
                typer.echo("and more")
            return
        target = to or Path(Path(path).name)
        part = target.with_name(f"{target.name}.part")
        try:
            with part.open("wb") as file:
                size = client.download(job_id, path, file)
            part.replace(target)
        except OSError as error:
            raise fail(f"{target}: {error.strerror}") from None
        finally:
            part.unlink(missing_ok=True)
    typer.echo(f"{target}  {size} bytes")


def retry(job_id: str, state: State = None) -> None:
    """Give a job that failed or was cancelled another attempt."""
    with connected(state) as client:
        answer = client.retry(job_id)
    typer.echo(f"{answer['id']}  {answer['state']}")


def delete(
    job_id: str,
    state: State = None,
    outputs: Annotated[bool, typer.Option("--outputs", help="also an output directory outside its own")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
) -> None:
    """Remove an ended job for good, once it was told what goes."""
    with connected(state) as client:
        told = client.delete(job_id, outputs)
        typer.echo(_told(told))
        if not yes and not typer.confirm("remove this?"):
            raise fail("nothing was removed")
        client.delete(job_id, outputs, told["confirm"])
    typer.echo(f"{job_id}  deleted")


def _told(removal: Removal) -> str:
    lines = [f"goes   {path}" for path in removal["paths"]] + [f"stays  {path}" for path in removal["kept"]]
    return plain("\n".join([*lines, f"{removal['bytes'] / 1e6:.1f} MB"]))


def stats(
    state: State = None, days: Annotated[float, typer.Option(help="back from now")] = 7.0, as_json: Json = False
) -> None:
    """Show jobs by state, how they ended lately and why, the queue, and GPU hours."""
    with connected(state) as client:
        found = client.stats(days)
    if as_json:
        show_json(found)
        return
    typer.echo(f"jobs      {_counts(found['jobs'])}")
    waits = "" if found["oldest_queued_s"] is None else f", the oldest for {found['oldest_queued_s']:.0f} s"
    typer.echo(f"queue     {found['queue_length']}{waits}")
    typer.echo(f"ended     {_counts(found['ended'])} in {found['days']:g} days")
    typer.echo(f"reasons   {_counts(found['reasons'])}")
    typer.echo(f"GPU hours {found['gpu_hours']:g}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "none"


@pipeline_app.command()
def show(pipeline_id: str, state: State = None, as_json: Json = False) -> None:
    """Show a pipeline with its jobs."""
    with connected(state) as client:
        found = client.pipeline(pipeline_id)
    if as_json:
        show_json(found)
        return
    show_pipeline(found)


@pipeline_app.command("list")
def list_pipelines(state: State = None, limit: Limit = 20, cursor: Cursor = None, as_json: Json = False) -> None:
    """List the newest pipelines, newest first."""
    with connected(state) as client:
        found = client.pipelines(limit, cursor)
    if as_json:
        show_json(found)
        return
    for one in found["pipelines"]:
        typer.echo(plain(f"{one['id']}  {one['name']:<20}  {one['summary']}"))
    tell_of_more(found)


@pipeline_app.command()
def cancel(
    pipeline_id: str,
    state: State = None,
    grace: Annotated[float | None, typer.Option(min=0, help="seconds before it is killed")] = None,
    checkpoint: Annotated[bool, typer.Option(help="a training saves before it stops")] = True,
) -> None:
    """Stop every job of a pipeline that has not ended."""
    with connected(state) as client:
        show_pipeline(client.cancel_pipeline(pipeline_id, grace, checkpoint))


def show_pipeline(pipeline: Pipeline) -> None:
    """Print a pipeline and a line for each of its jobs."""
    typer.echo(plain(f"{pipeline['id']}  {pipeline['name']}\n{pipeline['summary']}"))
    for job in pipeline["jobs"]:
        typer.echo(plain(f"{job['id']}  {job['name']:<20}  {job['stage']:<9}  {job['summary']}"))


def show_dry_run(answer: dict[str, Any]) -> None:
    """Print what a request would become, for a person."""
    for job in answer["jobs"]:
        look = job["preflight"]
        waits = f", behind {', '.join(job['depends_on'])}" if job["depends_on"] else ""
        lines = [f"{job['name']} ({job['stage']}{waits})"]
        lines += [f"  {path['field']:<14} {path['path']}  ({path['state']})" for path in look["paths"]]
        for title in ("verifier", "data", "drafter"):
            if look[title] is not None:
                shown = ", ".join(f"{name} {value}" for name, value in look[title].items() if name != "path")
                lines.append(f"  {title:<14} {shown}")
        gpus = job["resources"]["gpus"]
        lines.append(f"  GPUs           {'as many as the stage takes' if gpus is None else gpus}")
        lines.append(f"  GPU memory     {_gigabytes(look['gpu_memory']['bytes'])}{look['gpu_memory']['basis']}")
        lines.append(f"  disk           {_gigabytes(look['space']['bytes'])}{look['space']['basis']}")
        free = look["space"]["free_bytes"]
        lines.append("  free there     " + ("not known" if free is None else f"{free / 1e9:.1f} GB"))
        seconds = look["time"]["seconds"]
        lines.append("  time           " + ("" if seconds is None else f"{seconds:.0f} s: ") + look["time"]["basis"])
        lines += [f"  warning [{one['code']}] {one['pointer']}: {one['message']}" for one in look["warnings"]]
        typer.echo(plain("\n".join(lines)))
        _show_preview(look["preview"])
    typer.echo("nothing was stored")


def _show_preview(preview: dict[str, Any] | None) -> None:
    if preview is None:
        return
    if preview["trouble"] is not None:
        typer.echo(plain(f"  first rows     not shown: {preview['trouble']}"))
    for row in preview["rows"]:
        out = "" if row["left_out"] is None else f", left out: {row['left_out']}"
        typer.echo(plain(f"  line {row['row']}: {row['tokens']} tokens, {row['supervised']} trained on{out}"))
        for part, trained in row["parts"]:
            for line in plain(part).splitlines():
                typer.secho(f"    {'|' if trained else ' '} {line}", fg="green" if trained else None)


def _gigabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:.3f} GB: "
