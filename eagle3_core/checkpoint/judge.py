"""The judge: is this checkpoint what a server and the next epoch need it to be?

    quick   headers, sizes, names, shapes, config      milliseconds, without torch (quick.py)
    full    and every byte once                        as fast as the disk or the digest, in bounded memory

It reads, compares and counts; it never runs code that lies in a checkpoint, and holds one piece of one tensor at a
time. The checks on bytes stand in judge_bytes (digests), judge_values (finite, zero, doubled), judge_previous (the
epoch before) and judge_rows (the verifier's embedding and head).
"""

from functools import partial
from pathlib import Path
from typing import Literal

from eagle3_core.checkpoint.findings import Finding, Report, Verdict
from eagle3_core.checkpoint.judge_bytes import Part, read_file
from eagle3_core.checkpoint.judge_files import CONFIG_NAME
from eagle3_core.checkpoint.judge_previous import EMBED_TOKENS, HEAD, NOT_TRAINED, Previous, check_against_previous
from eagle3_core.checkpoint.judge_rows import watch_embedding, watch_head
from eagle3_core.checkpoint.judge_values import Scan, is_scanned, judge_moments, judge_weights
from eagle3_core.checkpoint.quick import Inspected, inspect, judge_quick
from eagle3_core.checkpoint.servability import tell_servers
from eagle3_core.checkpoint.stream import OpenFile, Stream
from eagle3_core.checkpoint.weights import Entry
from eagle3_core.errors import BadInput

__all__ = ["Finding", "Verdict", "judge"]


def judge(
    path: Path,
    *,
    level: Literal["quick", "full"] = "full",
    previous: Path | None = None,
    verifier: Path | None = None,
    expect_drafter: bool = True,
    max_mb_per_s: float | None = None,
) -> Verdict:
    """The verdict on a checkpoint.

    Args:
        path: a checkpoint directory; an output directory, whose latest epoch is judged; or one weight file, of which
            only header and values are judged.
        level: how far to look.
        previous: checkpoint of the epoch before; its weights must differ, its vocabulary map must not. Compared at
            level full.
        verifier: directory of the verifier, to compare sizes, layer ids, embedding and head with.
        expect_drafter: false judges the weights alone of what is no EAGLE-3 drafter and does not claim to be one:
            files, headers, values, and against `previous`.
        max_mb_per_s: read no faster than that, in 10^6 bytes.
    """
    if level == "quick":
        return judge_quick(path, verifier=verifier, expect_drafter=expect_drafter)
    report = Report(path)
    found = inspect(report, path, verifier, expect_drafter)
    if found is not None:
        _judge_bytes(report, found, previous, Stream(None if max_mb_per_s is None else max_mb_per_s * 1e6))
        if found.source is not None and found.weights is not None:
            tell_servers(
                report,
                found.path / CONFIG_NAME,
                found.source,
                found.weights,
                found.verifier,
                map_sound=found.targets is not None,
                embedding_differs=report.has("embedding_differs"),
            )
    return report.verdict("full")


def _judge_bytes(report: Report, found: Inspected, previous: Path | None, stream: Stream) -> None:
    """Read every file that the manifest lists or that holds tensors, each once."""
    earlier = None
    if previous is not None and found.weights is not None:
        try:
            earlier = Previous(previous)
        except (BadInput, OSError) as error:
            report.add("previous_unreadable", f"the previous checkpoint could not be read: {error}")
    parts = _weight_parts(report, found, earlier)
    for file, more in _state_parts(report, found).items():
        parts.setdefault(file, []).extend(more)
    listed = [] if found.manifest is None else [found.path / name for name in found.manifest.files]
    weights = found.weights
    archives = {} if weights is None else dict(weights.archives)
    if found.state is not None:
        archives[found.state.archive.path] = found.state.archive
    for file in sorted({*listed, *parts}):
        if file.is_file():
            read_file(report, file, parts.get(file, []), found.manifest, archives.get(file), stream)
    if earlier is not None and weights is not None:
        check_against_previous(report, found.path, weights, earlier, found.state, _frozen(found))


def _frozen(found: Inspected) -> frozenset[str]:
    """What the training of this checkpoint did not change."""
    if not found.drafter:
        return frozenset()
    trained = None if found.state is None else found.state.trained
    if trained is not None:
        return (NOT_TRAINED | {HEAD}) - trained  # speculators froze the head from 0.5 on
    return NOT_TRAINED - ({EMBED_TOKENS} if found.source is not None and found.source.config.own_embedding else set())


def _weight_parts(report: Report, found: Inspected, earlier: Previous | None) -> dict[Path, list[Part]]:
    """Each tensor of the drafter, with what looks at it."""
    parts: dict[Path, list[Part]] = {}
    for name, entry in ({} if found.weights is None else found.weights.entries).items():
        if entry.location is None:
            what = f"{name}: its elements do not lie in order, and were not looked at"
            report.add("unsupported_part", what, file=entry.file, tensor=name)
            continue
        info = entry.location.info
        part = Part(name, entry.stored_name, info.start, info.end)
        if is_scanned(entry.dtype, entry.shape):
            scan = Scan(info, rows=True)
            part.row_bytes = scan.row_bytes
            part.looks.append(scan.update)
            part.done.append(partial(_scanned, report, name, entry, scan))
        if earlier is not None:
            earlier.watch(name, entry, part, found.manifest)
        _watch_verifier(report, found, name, entry, part)
        parts.setdefault(entry.file, []).append(part)
    return parts


def _scanned(report: Report, name: str, entry: Entry, scan: Scan, file: OpenFile) -> None:
    judge_weights(report, name, entry, scan.finish(file))


def _watch_verifier(report: Report, found: Inspected, name: str, entry: Entry, part: Part) -> None:
    verifier, source = found.verifier, found.source
    if verifier is None or source is None or len(entry.shape) != 2 or not is_scanned(entry.dtype, entry.shape):
        return
    hidden = verifier.config.hidden_size
    if entry.shape[1] != hidden:
        return
    if name == EMBED_TOKENS and verifier.embedding is not None:
        watch_embedding(report, entry, part, verifier.embedding, source.config.own_embedding)
    elif name == HEAD and verifier.head is not None and len(found.targets or ()) == entry.shape[0]:
        # What was trained on from another drafter has that one's rows where its vocabulary had the token.
        mixed = found.manifest is not None and found.manifest.extra.get("finetune_from") is not None
        watch_head(report, entry, part, verifier.head, found.targets or [], mixed, HEAD in _frozen(found))


def _state_parts(report: Report, found: Inspected) -> dict[Path, list[Part]]:
    """Each tensor of the optimizer's state."""
    if found.state is None:
        return {}
    file = found.state.archive.path
    parts = []
    for name, key, tensor in found.state.tensors():
        if tensor.info is None or not is_scanned(tensor.dtype, tensor.shape):
            continue
        scan = Scan(tensor.info, rows=False)
        part = Part(name, f"{name} {key}", tensor.info.start, tensor.info.end, scan.row_bytes, [scan.update])
        part.done.append(partial(_moments_scanned, report, file, name, key, scan))
        parts.append(part)
    return {file: parts}


def _moments_scanned(report: Report, file: Path, name: str, key: str, scan: Scan, opened: OpenFile) -> None:
    judge_moments(report, file, name, key, scan.finish(opened))
