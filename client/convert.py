"""`eyas checkpoint convert` and `eyas checkpoint diff`, without a daemon."""

import json
from pathlib import Path

import typer

from client.checkpoint import show_servers, show_verdict
from eagle3_core.checkpoint.compare import compare
from eagle3_core.checkpoint.convert import convert as convert_checkpoint
from eagle3_core.contract.params import ServedFormat
from eagle3_core.contract.plain import plain
from eagle3_core.errors import Eagle3Error

REFUSED = 2
"""Exit status where nothing was written, or nothing could be compared."""


def convert(
    source: Path,
    destination: Path,
    target: ServedFormat,
    verifier: Path | None,
    verifier_name: str | None,
    aux_layer_ids: str | None,
    max_mb_per_s: float | None,
    as_json: bool,
) -> int:
    """Convert, and print how the result was judged; returns the exit status."""
    try:
        done = convert_checkpoint(
            source,
            destination,
            target,
            verifier=verifier,
            verifier_name=verifier_name,
            aux_layer_ids=None if aux_layer_ids is None else [int(word) for word in aux_layer_ids.split(",")],
            max_mb_per_s=max_mb_per_s,
        )
    except (Eagle3Error, OSError) as error:
        return _refused(error)
    except ValueError:
        return _refused(f"--aux-layer-ids {aux_layer_ids} is no list of numbers such as 2,30,58")
    if as_json:
        print(json.dumps(done.to_dict(), indent=1))
    else:
        for note in done.notes:
            print(plain(f"note: {note}"))
        show_verdict(destination, done.verdict)
        show_servers(done.verdict.servers)
    return 0 if done.verdict.verdict == "valid" else 1


def diff(one: Path, other: Path, verifier: Path | None, tolerance: float, as_json: bool) -> int:
    """Compare, and print what differs; returns the exit status."""
    try:
        found = compare(one, other, verifier=verifier, tolerance=tolerance)
    except (Eagle3Error, OSError) as error:
        return _refused(error)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
        return 0 if found.equal else 1
    for difference in found.differences:
        print(plain(f"{difference.what}: {difference.message}"))
    for note in found.notes:
        print(f"note: {note}")
    count = len(found.differences)
    print("they mean the same" if found.equal else f"{count} difference{'s' if count > 1 else ''}")
    return 0 if found.equal else 1


def _refused(error: object) -> int:
    typer.echo(plain(f"eyas: {error}"), err=True)
    return REFUSED
