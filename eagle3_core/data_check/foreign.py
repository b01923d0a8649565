"""The judge on hidden states in the files of speculators' offline extraction: one hs_<i>.safetensors a row.

    hidden_states  float [T, S, H]   aux states in ascending order of their layers, the last one behind them
    token_ids      int64 [T]
    hs_<i>.safetensors.lock          held (flock) while the file is written; a dead writer leaves it behind

Source: vLLM's ExampleHiddenStatesConnector and speculators 0.5 to 0.9. The files do not say of which layers, before or
behind the final norm, or of which verifier their states are: that is said, and judged only beside a verifier.

T tokens, S slots, H hidden.
"""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from blake3 import blake3

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.judge_files import add_unreadable
from eagle3_core.contract.headers import TensorFile, read_header
from eagle3_core.contract.locks import is_held
from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.contract.weight_files import TensorLocation
from eagle3_core.data_check.expected import ExpectedRows
from eagle3_core.data_check.findings import RowFindings, missing_rows
from eagle3_core.data_check.shards import Repeats, add_ids_out_of_range, add_state_faults
from eagle3_core.data_check.states import Slot, StateScan
from eagle3_core.data_check.targets import TargetCheck, looked_at, tokens_around
from eagle3_core.errors import UnreadableFile
from eagle3_core.verifier.tensors import TORCH_DTYPES, load_tensor, tensor_chunks

FILES = "hs_*.safetensors"

_NAME = re.compile(r"hs_(\d{1,12})\.safetensors")
_FLOATS = frozenset({"F32", "F16", "BF16", "F8_E4M3"})


@dataclass(frozen=True)
class _Row:
    """A file whose header could be read, and the row it is for."""

    number: int
    file: TensorFile


def check_foreign(
    report: Report,
    directory: Path,
    level: Literal["quick", "full"],
    expected: ExpectedRows | None,
    verifier: VerifierFiles | None,
    slots: int | None,
) -> None:
    """Judge a directory of hs_<i>.safetensors.

    Args:
        report: where findings go.
        directory: that holds the files.
        level: quick reads headers alone.
        expected: what the rows should hold.
        verifier: the states should be of; without it, the width of most files is taken for right.
        slots: states a token; default: those of most files.
    """
    findings = RowFindings(report)
    rows = _open_files(report, findings, directory)
    count = len(expected.rows) if expected is not None else max((row.number for row in rows), default=-1) + 1
    present = Counter(row.number for row in rows)
    for number in (number for number, files in present.items() if files > 1):
        findings.add("row_twice", f"{present[number]} files are for row {number}")
    if missing := missing_rows(present, count):
        report.add("rows_missing", f"{missing} have no sound file")
    shapes = [row.file.tensors["hidden_states"].shape for row in rows]
    wanted_slots = slots or _most_common([shape[1] for shape in shapes if len(shape) == 3])
    width = verifier.hidden_size if verifier is not None else None
    wanted_width = width or _most_common([shape[2] for shape in shapes if len(shape) == 3])
    sound = [row for row in rows if _check_shapes(findings, row, wanted_slots, wanted_width)]
    if level == "full":
        reader = _FileReader(findings, expected, verifier)
        for row in sound:
            reader.read(row)
        reader.finish()
    if rows:
        what = "these files do not say which layers their states are of, nor whether the last is behind the final norm"
        report.add("meaning_unsaid", what)
    findings.finish()


def _most_common(sizes: list[int]) -> int | None:
    """What most files hold; None where as many hold something else."""
    counts = Counter(sizes).most_common(2)
    return counts[0][0] if counts and (len(counts) == 1 or counts[0][1] > counts[1][1]) else None


def _open_files(report: Report, findings: RowFindings, directory: Path) -> list[_Row]:
    """The files whose headers can be read, by row."""
    rows = []
    for file in sorted(directory.iterdir()):
        if file.name.endswith(".safetensors.lock"):
            if not (owner := file.with_suffix("")).exists():
                code, how = ("being_written", "is held") if _is_held(file) else ("orphan_lock", "is nobody's")
                findings.add(code, f"{file.name} {how}, and {owner.name} is not there", file=file)
            continue
        named = _NAME.fullmatch(file.name)
        if named is None:
            report.add("unlisted_file", f"{file.name} is not named hs_<row>.safetensors", file=file)
            continue
        lock = file.with_name(f"{file.name}.lock")
        if lock.exists() and _is_held(lock):
            findings.add("being_written", f"{file.name} is being written: its lock is held", file=file)
            continue
        header: TensorFile | None = None
        try:
            header = read_header(file)
        except UnreadableFile as error:
            add_unreadable(report, error)
        if lock.exists():
            how = "is whole" if header is not None else "is not: it died while it wrote"
            findings.add("orphan_lock", f"{lock.name} was left by a writer that is gone; its file {how}", file=lock)
        if header is None:
            continue
        if "hidden_states" not in header.tensors:
            findings.add("shard_differs", f"{file.name} holds no hidden_states", file=file)
            continue
        rows.append(_Row(int(named[1]), header))
    return sorted(rows, key=lambda row: row.number)


def _is_held(lock: Path) -> bool:
    """Whether a living process holds the lock; one that cannot be opened says nothing."""
    with suppress(OSError):
        return is_held(lock)
    return False


def _check_shapes(findings: RowFindings, row: _Row, slots: int | None, width: int | None) -> bool:
    """Whether a file's tensors have the shapes that states and token ids should have."""
    file, tensors = row.file.path, row.file.tensors
    states = tensors["hidden_states"]
    if states.dtype not in _FLOATS or len(states.shape) != 3 or states.shape[1:] != (slots, width):
        wanted = f"[tokens, {slots or 'slots'}, {width or 'width'}]"
        what = f"hidden_states is {states.dtype} {list(states.shape)}, expected {wanted}"
        if slots is None or width is None:
            what += ", and files do not agree: --slots says how many states a token are right, --verifier how wide"
        if len(states.shape) == 2 and width and states.shape[1] % width == 0:
            what += f": {states.shape[1] // width} states a token lie in one"
        findings.add("slots_differ", what, file=file, tensor="hidden_states")
        return False
    ids = tensors.get("token_ids")
    if ids is None or ids.dtype != "I64" or len(ids.shape) != 1:
        found = "absent" if ids is None else f"{ids.dtype} {list(ids.shape)}"
        findings.add("shard_differs", f"token_ids is {found}, expected I64 [tokens]", file=file, tensor="token_ids")
        return False
    if states.shape[0] != ids.shape[0] or not states.shape[0]:
        what = f"{states.shape[0]} hidden states for {ids.shape[0]} token ids"
        findings.add("lengths_differ", what, file=file, tensor="hidden_states")
        return False
    return True


class _FileReader:
    """Reads files one after the other, each to its end."""

    def __init__(self, findings: RowFindings, expected: ExpectedRows | None, verifier: VerifierFiles | None) -> None:
        self._findings, self._expected, self._verifier = findings, expected, verifier
        self._targets = None if verifier is None else TargetCheck(findings, verifier, None)
        self._repeats = Repeats(findings)

    def read(self, row: _Row) -> None:
        """One file, whose tensors have the right shapes."""
        file, states, digest = row.file.path, row.file.tensors["hidden_states"], blake3()
        dtype = TORCH_DTYPES[states.dtype]
        try:
            ids = load_tensor(TensorLocation("token_ids", file, row.file.tensors["token_ids"]))
            if self._expected is not None:
                self._expected.compare(self._findings, file, row.number, ids, None)
            scan = StateScan(states.shape[1], dtype)
            tokens, last = looked_at(len(ids)), []
            for piece in tensor_chunks(TensorLocation("hidden_states", file, states)):
                part = piece.view(-1, *states.shape[1:])
                seen = scan.faults.tokens
                last += [part[token - seen, -1].float() for token in tokens if 0 <= token - seen < len(part)]
                scan.update(part)
                digest.update(piece.contiguous().view(torch.uint8).numpy().data)
        except UnreadableFile as error:
            add_unreadable(self._findings.report, error)
            return
        if self._verifier is not None:
            add_ids_out_of_range(self._findings, file, row.number, ids, self._verifier.vocab_size)
        if self._targets is not None and last and dtype.itemsize > 1:
            self._targets.add(file, row.number, torch.stack(last), tokens_around(ids))
        slots = [Slot(f"slot {number}", number + 1) for number in range(states.shape[1])]
        add_state_faults(self._findings, file, row.number, scan.faults, slots, ids)
        if min(scan.faults.zero) < scan.faults.tokens:  # zeros are no other row's
            self._repeats.add(file, row.number, digest.hexdigest(), ids)

    def finish(self) -> None:
        """What the files say together."""
        self._repeats.finish()
        if self._targets is not None:
            self._targets.finish()
