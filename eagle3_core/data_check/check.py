"""The judge of hidden states: is this store what training needs it to be?

    quick   index, sizes, headers, layers, rows, fingerprints       no state is read
    full    and every byte once: digests, token ids, masks, states  as fast as the disk or the digest, in bounded memory

A directory with index.json is a store (shards.py reads its shards), one with hs_<i>.safetensors is what speculators'
offline extraction leaves (foreign.py); targets.py holds last states against the verifier. Findings and verdicts are
those of checkpoints; docs/findings.md explains them.
"""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from eagle3_core.checkpoint.findings import Report, Verdict
from eagle3_core.checkpoint.judge_files import add_unreadable
from eagle3_core.checkpoint.stream import Stream
from eagle3_core.contract.headers import TensorFile, read_header
from eagle3_core.contract.store_files import INDEX, ShardEntry, StoreIndex, StoreMeta, read_index
from eagle3_core.contract.verifier_files import (
    VerifierFiles,
    config_fingerprint,
    read_verifier_files,
    tokenizer_fingerprint,
)
from eagle3_core.data.store import open_shard
from eagle3_core.data_check.expected import ExpectedRows, read_expected
from eagle3_core.data_check.findings import RowFindings, missing_rows
from eagle3_core.data_check.foreign import FILES, check_foreign
from eagle3_core.data_check.shards import ShardReader
from eagle3_core.errors import BadData, BadInput, UnreadableFile

StoreLevel = Literal["quick", "full"]


def check_data(
    path: Path,
    *,
    level: StoreLevel = "full",
    prepared: Path | None = None,
    verifier: Path | None = None,
    slots: int | None = None,
    max_mb_per_s: float | None = None,
) -> Verdict:
    """The verdict on a hidden-state store, or on a directory of hs_<i>.safetensors.

    Args:
        path: the directory.
        level: how far to look.
        prepared: what the rows should hold: output of a prepare job, or a JSON or JSONL file of rows with `input_ids`
            and `loss_mask`.
        verifier: directory of the verifier the states should be of.
        slots: states a token, the last one included; default: of hs_<i>.safetensors what most hold.
        max_mb_per_s: read no faster than that.
    """
    report = Report(path)
    expected = files = None
    try:
        expected = None if prepared is None else read_expected(prepared)
    except (BadData, BadInput) as error:
        report.add("rows_unreadable", str(error))
    try:
        files = None if verifier is None else read_verifier_files(verifier)
    except BadInput as error:
        report.add("verifier_unreadable", str(error))
    stream = Stream(None if max_mb_per_s is None else max_mb_per_s * 1e6)
    try:
        if (path / INDEX).exists():
            _check_store(report, path, level, expected, files, slots, stream)
        elif (folder := next((d for d in (path, path / "hidden_states") if any(d.glob(FILES))), None)) is not None:
            check_foreign(report, folder, level, expected, files, slots)
        else:
            _no_store(report, path)
    except OSError as error:
        report.unreadable = True
        report.add("no_store", f"{error.filename or path} cannot be read: {error.strerror}")
    return report.verdict(level)


def _no_store(report: Report, path: Path) -> None:
    report.unreadable = True
    shards = sorted(path.glob("shard_*.safetensors")) if path.is_dir() else []
    if shards:
        what = f"{len(shards)} shards and no {INDEX}: the extraction has not finished"
        report.add("unfinished_store", what)
        return
    what = "holds neither index.json nor hs_<i>.safetensors" if path.is_dir() else "is no directory"
    report.add("no_store", f"{path} {what}")


def _check_store(
    report: Report,
    path: Path,
    level: StoreLevel,
    expected: ExpectedRows | None,
    verifier: VerifierFiles | None,
    slots: int | None,
    stream: Stream,
) -> None:
    try:
        index = read_index(path)
    except BadData as error:
        report.unreadable = True
        report.add("bad_index", str(error), file=path / INDEX)
        return
    _check_layers(report, path / INDEX, index.meta)
    for name in ("layer_id_convention", "last_state"):
        if name not in index.meta.model_fields_set:
            what = f"{INDEX} does not say the {name}: {dict(index.meta)[name]!r} is taken for it"
            report.add("meaning_unsaid", what, file=path / INDEX)
    if slots not in (None, held := len(index.meta.layer_ids) + 1):
        report.add("slots_differ", f"{held} states a token, expected {slots}", file=path / INDEX)
    _check_rows(report, path / INDEX, index, expected)
    if expected is not None and expected.tokenizer_fingerprint not in (None, index.meta.tokenizer_fingerprint):
        what = f"the states were made with another tokenizer than that of {expected.source}"
        report.add("other_tokenizer", what, file=path / INDEX)
    fits = verifier is None or _fits_verifier(report, path / INDEX, index.meta, verifier)
    files = {shard.file: _open_shard(report, path, shard, index.meta) for shard in index.shards}
    _check_strays(report, path, files.keys())
    if level == "full":
        reader = ShardReader(report, index.meta, expected, verifier if fits else None, stream)
        for shard in index.shards:
            if (file := files[shard.file]) is not None:
                reader.read(shard, file)
        reader.finish()


def _check_layers(report: Report, file: Path, meta: StoreMeta) -> None:
    ids = list(meta.layer_ids)
    if ids != sorted(set(ids)) or not ids or ids[0] < 0 or ids[-1] > meta.num_hidden_layers:
        what = f"layer_ids {ids} do not ascend without repeats within 0..{meta.num_hidden_layers}"
        report.add("bad_layer_ids", what, file=file)
    if meta.last_layer_id != meta.num_hidden_layers:
        what = f"the last state is the one entering layer {meta.last_layer_id}, of {meta.num_hidden_layers} layers"
        report.add("last_state_early", what, file=file)


def _check_rows(report: Report, file: Path, index: StoreIndex, expected: ExpectedRows | None) -> None:
    """Each row once, one behind the other in its shard, and none missing."""
    findings = RowFindings(report)
    rows = Counter(entry.row for shard in index.shards for entry in shard.rows)
    for row, count in sorted(rows.items()):
        if count > 1:
            findings.add("row_twice", f"row {row} is listed {count} times", file=file)
    count = max(rows, default=-1) + 1 if expected is None else len(expected.rows)
    if missing := missing_rows(rows, count):
        report.add("rows_missing", f"{missing} are not there", file=file)
    for shard in index.shards:
        position = 0
        for entry in sorted(shard.rows, key=lambda entry: entry.start):
            if entry.start != position:
                how = "overlaps the one before" if entry.start < position else "leaves a hole before it"
                findings.add("rows_overlap", f"{shard.file}: row {entry.row} {how} (token {entry.start})", file=file)
            position = max(position, entry.start + entry.length)
    findings.finish()


def _fits_verifier(report: Report, file: Path, meta: StoreMeta, verifier: VerifierFiles) -> bool:
    """Whether the states could be of this verifier, as far as sizes tell; fingerprints are compared as well."""
    for name in ("hidden_size", "vocab_size", "num_hidden_layers"):
        theirs, ours = vars(verifier)[name], dict(meta)[name]
        if theirs != ours:
            report.add("other_verifier", f"{name} is {ours}, {verifier.path} has {theirs}", file=file)
            return False
    if meta.config_fingerprint != config_fingerprint(verifier.path):
        what = f"the states were made with another config.json ({meta.verifier}) than that of {verifier.path}"
        report.add("other_verifier", what, file=file)
    if meta.tokenizer_fingerprint != tokenizer_fingerprint(verifier.path):
        what = f"the states were made with another tokenizer ({meta.verifier}) than that of {verifier.path}"
        report.add("other_tokenizer", what, file=file)
    return True


def _open_shard(report: Report, directory: Path, shard: ShardEntry, meta: StoreMeta) -> TensorFile | None:
    """The header of a shard; None where its states cannot be looked at."""
    path = directory / shard.file
    if Path(shard.file).name != shard.file or not path.is_file():
        report.add("missing_file", f"{shard.file} is listed in {INDEX} and is no file of this directory", file=path)
        return None
    try:
        header = read_header(path)
    except UnreadableFile as error:
        add_unreadable(report, error)
        return None
    size = path.stat().st_size
    if size != shard.bytes:
        report.add("size_differs", f"{shard.file} has {size:,} bytes, {INDEX} says {shard.bytes:,}", file=path)
        return None
    try:
        return open_shard(directory, shard, meta)
    except BadData as error:
        report.add("shard_differs", str(error).removeprefix(f"{header.path}: "), file=path)
        return None


def _check_strays(report: Report, path: Path, listed: Collection[str]) -> None:
    for file in sorted(path.glob("*.safetensors*")):
        if file.name not in listed:
            report.add("unlisted_file", f"{file.name} is not in {INDEX}", file=file)
