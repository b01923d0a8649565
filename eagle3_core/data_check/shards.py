"""The judge on the bytes of a store's shards: each file read once, in order, with its digest and every look on the way.

T tokens of a piece, S slots (aux states, then the last one), H hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from eagle3_core.checkpoint.digest import Hasher
from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.judge_bytes import Part, read_file
from eagle3_core.checkpoint.judge_values import Scan, is_scanned
from eagle3_core.checkpoint.manifest import FileEntry, Manifest
from eagle3_core.checkpoint.stream import Stream
from eagle3_core.contract.headers import TensorFile
from eagle3_core.contract.store_files import RowEntry, ShardEntry, StoreMeta
from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.data.fp8 import MAX_SCALE
from eagle3_core.data_check.expected import ExpectedRows
from eagle3_core.data_check.findings import RowFindings
from eagle3_core.data_check.states import RowFaults, Slot, StateScan
from eagle3_core.data_check.targets import TargetCheck, looked_at, tokens_around
from eagle3_core.verifier.tensors import TORCH_DTYPES


class ShardReader:
    """Reads shards one after the other, and remembers of each row two digests.

    Args:
        report: where findings go.
        meta: of the store.
        expected: what its rows should hold.
        verifier: the states should be of.
        stream: reads the files.
    """

    def __init__(
        self,
        report: Report,
        meta: StoreMeta,
        expected: ExpectedRows | None,
        verifier: VerifierFiles | None,
        stream: Stream,
    ) -> None:
        self._findings, self._meta, self._expected, self._stream = RowFindings(report), meta, expected, stream
        is_fp8 = meta.dtype == "float8_e4m3"
        self._targets = TargetCheck(self._findings, verifier, meta.last_state, is_fp8) if verifier else None
        self._slots = slots_of(meta)
        self._repeats = Repeats(self._findings)
        self._rows = self._without_answer = self._all_answer = 0
        self._first_without: int | None = None

    def read(self, shard: ShardEntry, file: TensorFile) -> None:
        """One shard, whose header fits the index."""
        look = _Look(file, shard, len(self._slots))
        noted = [f"{name}:{value}" for name, value in shard if name in ("blake3", "sha256") and value is not None]
        manifest = Manifest(None, {}, {shard.file: FileEntry(shard.bytes, noted[0])}, {}, {}, None)
        read_file(self._findings.report, file.path, look.parts(), manifest, None, self._stream)
        if look.complete:
            for row in look.rows:
                self._judge_row(file.path, row, *look.tokens_of(row.entry))
                if odd := look.odd_scales_of(row.entry):
                    what = f"row {row.entry.row}: {odd} scales are not what eight-bit states are made with"
                    self._findings.add("bad_scale", what, file=file.path, tensor="scales")
                if self._targets is not None:
                    ids, _ = look.tokens_of(row.entry)
                    self._targets.add(file.path, row.entry.row, look.last_states_of(row), tokens_around(ids))
        for name, scan in look.others.items():
            if scan.counts.nan or scan.counts.inf:
                what = f"{name} holds {scan.counts.nan} NaN and {scan.counts.inf} Inf"
                self._findings.add("states_not_finite", what, file=file.path, tensor=name)

    def finish(self) -> None:
        """What the rows say together."""
        self._repeats.finish()
        if self._rows and self._without_answer == self._rows:
            self._findings.add("nothing_supervised", f"the mask of all {self._rows} rows is empty")
        elif self._without_answer:
            what = f"the mask of {self._without_answer} of {self._rows} rows is empty, the first is row"
            self._findings.add("no_answer", f"{what} {self._first_without}")
        if self._rows and self._all_answer == self._rows:
            self._findings.add("all_supervised", f"every token of all {self._rows} rows is supervised, prompts too")
        if self._targets is not None:
            self._targets.finish()
        self._findings.finish()

    def _judge_row(self, path: Path, row: "_RowLook", ids: Tensor, mask: Tensor) -> None:
        entry = row.entry
        self._rows += 1
        if (marks := int(mask.max())) > 1:
            what = f"row {entry.row}: loss_mask holds {marks}, which is neither 0 nor 1"
            self._findings.add("bad_mask", what, file=path, tensor="loss_mask")
        if not bool(mask.any()):
            self._without_answer += 1
            self._first_without = entry.row if self._first_without is None else self._first_without
        self._all_answer += bool(mask.all())
        add_ids_out_of_range(self._findings, path, entry.row, ids, self._meta.vocab_size)
        if self._expected is not None:
            self._expected.compare(self._findings, path, entry.row, ids, mask.bool())
        add_state_faults(self._findings, path, entry.row, row.scan.faults, self._slots, ids)
        if min(row.scan.faults.zero) < entry.length:  # zeros are no other row's
            self._repeats.add(path, entry.row, row.digest.hexdigest(), ids)


class Repeats:
    """Rows that hold what an earlier one holds: of each two digests are remembered."""

    def __init__(self, findings: RowFindings) -> None:
        self._findings = findings
        self._row_of_states: dict[str, tuple[int, bytes]] = {}
        self._row_of_ids: dict[bytes, int] = {}
        self._rows = self._same_ids = 0

    def add(self, path: Path, row: int, states: str, ids: Tensor) -> None:
        """Note a row by the digest of its states and its token ids, int64 [T]."""
        self._rows += 1
        tokens = blake3(ids.numpy().tobytes()).digest(16)
        if self._row_of_ids.setdefault(tokens, row) != row:
            self._same_ids += 1
        earlier, its_tokens = self._row_of_states.setdefault(states, (row, tokens))
        if its_tokens != tokens:
            what = f"row {row} holds the states of row {earlier}, and other token ids"
            self._findings.add("states_of_other_row", what, file=path, tensor="hidden_states")

    def finish(self) -> None:
        """Say how many rows hold the same tokens."""
        if self._same_ids:
            what = f"{self._same_ids} of {self._rows} rows hold the same token ids as an earlier one"
            self._findings.add("rows_alike", what)


@dataclass
class _RowLook:
    """What is kept of one row: scan and digest of its states, and those last states that are looked at."""

    entry: RowEntry
    scan: StateScan
    digest: Hasher = field(default_factory=blake3)
    last: list[Tensor] = field(default_factory=list)


class _Look:
    """What is kept of one shard while it is read: token ids, masks, and a look at each row."""

    def __init__(self, file: TensorFile, shard: ShardEntry, slots: int) -> None:
        self._file = file
        states = file.tensors["hidden_states"]
        self._dtype, self._shape = TORCH_DTYPES[states.dtype], states.shape
        self._raw = {name: bytearray() for name in ("token_ids", "loss_mask", "scales") if name in file.tensors}
        self._token = self._done = 0
        in_order = sorted(shard.rows, key=lambda entry: entry.start)
        self.rows = [_RowLook(entry, StateScan(slots, self._dtype)) for entry in in_order]
        self.others: dict[str, Scan] = {}

    def parts(self) -> list[Part]:
        """Every tensor of the file, with what looks at it."""
        parts = []
        for name, info in self._file.tensors.items():
            part = Part(name, name, info.start, info.end)
            if name == "hidden_states":
                part.row_bytes = (info.end - info.start) // info.shape[0]
                part.looks.append(self._look_at_states)
            elif is_scanned(info.dtype, info.shape):
                self.others[name] = Scan(info, rows=False)
                part.looks.append(self.others[name].update)
            if name in self._raw:
                part.looks.append(self._raw[name].extend)
            parts.append(part)
        return parts

    @property
    def complete(self) -> bool:
        """Whether the file was read to its end."""
        wanted = {name: self._file.tensors[name] for name in self._raw}
        whole = all(len(self._raw[name]) == info.end - info.start for name, info in wanted.items())
        return whole and self._token == self._shape[0]

    def tokens_of(self, entry: RowEntry) -> tuple[Tensor, Tensor]:
        """(token_ids int64 [T], loss_mask uint8 [T]) of a row."""
        ids = torch.frombuffer(self._raw["token_ids"], dtype=torch.int64)
        mask = torch.frombuffer(self._raw["loss_mask"], dtype=torch.uint8)
        return ids[entry.start : entry.start + entry.length], mask[entry.start : entry.start + entry.length]

    def last_states_of(self, row: _RowLook) -> Tensor:
        """Float32 [P, H]: the last states of the tokens that are looked at, as they were before they were stored."""
        if not row.last:
            return torch.empty(0)
        last = torch.stack(row.last)
        if "scales" not in self._raw:
            return last
        scales = self._scales_of(row.entry)
        return last * scales[looked_at(row.entry.length), -1:]

    def odd_scales_of(self, entry: RowEntry) -> int:
        """How many scales of a row are finite, and no powers of two, or too large."""
        if "scales" not in self._raw:
            return 0
        scales = self._scales_of(entry)
        fits = (torch.frexp(scales).mantissa == 0.5) & (scales <= MAX_SCALE)
        return int((scales.isfinite() & ~fits).sum())

    def _scales_of(self, entry: RowEntry) -> Tensor:
        scales = torch.frombuffer(self._raw["scales"], dtype=torch.float32).view(self._shape[0], -1)
        return scales[entry.start : entry.start + entry.length]

    def _look_at_states(self, raw: memoryview) -> None:
        states = torch.frombuffer(raw, dtype=self._dtype).view(-1, *self._shape[1:])
        width = len(raw) // len(states)
        for row, first, last in self._rows_within(self._token, self._token + len(states)):
            row.scan.update(states[first:last])
            row.digest.update(raw[first * width : last * width])
            places = (row.entry.start + token - self._token for token in looked_at(row.entry.length))
            row.last += [states[place, -1].float() for place in places if first <= place < last]
        self._token += len(states)

    def _rows_within(self, start: int, end: int) -> Iterator[tuple[_RowLook, int, int]]:
        """Rows with tokens between start and end, and which of those tokens are theirs."""
        while self._done < len(self.rows) and _end(self.rows[self._done].entry) <= start:
            self._done += 1
        for row in self.rows[self._done :]:
            if row.entry.start >= end:
                return
            first, last = max(row.entry.start, start), min(_end(row.entry), end)
            if first < last:
                yield row, first - start, last - start


def _end(entry: RowEntry) -> int:
    return entry.start + entry.length


def slots_of(meta: StoreMeta) -> list[Slot]:
    """The slots of a store."""
    aux = [Slot(f"layer {layer}", layer) for layer in meta.layer_ids]
    return [*aux, Slot(f"the last state ({meta.last_layer_id})", meta.last_layer_id)]


def add_ids_out_of_range(findings: RowFindings, file: Path, row: int, ids: Tensor, vocab_size: int) -> None:
    """A finding where token ids of a row, int64 [T], are none of the verifier's."""
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()[:, 0].tolist()
    if outside:
        what = (
            f"row {row}: {len(outside)} token ids lie outside the vocabulary of {vocab_size}, the first is "
            f"{int(ids[outside[0]])} at position {outside[0]}"
        )
        findings.add("ids_out_of_range", what, file=file, tensor="token_ids")


def add_state_faults(
    findings: RowFindings, file: Path, row: int, faults: RowFaults, slots: list[Slot], ids: Tensor
) -> None:
    """Findings on the states of one row.

    Args:
        findings: where they go.
        file: that holds the row.
        row: its number.
        faults: what was seen.
        slots: what the states are.
        ids: int64 [T], token ids of the row.
    """

    def add(code: str, message: str) -> None:
        findings.add(code, f"row {row}: {message}", file=file, tensor="hidden_states")

    for number, slot in enumerate(slots):
        nan, inf, zero = faults.nan[number], faults.inf[number], faults.zero[number]
        if nan or inf:
            add("states_not_finite", f"{nan} NaN and {inf} Inf among the states of {slot.name}")
        if zero == faults.tokens:
            add("states_all_zero", f"the states of {slot.name} are all zero")
        elif zero and slot.layer != 0:  # the embedding of an unused token may be zero
            first = faults.first_zero[number]
            add("states_zero", f"{zero} of {faults.tokens} states of {slot.name} are zero, the first at token {first}")
        before = slots[number - 1]
        if number and faults.alike[number] == faults.tokens and slot.layer != before.layer:
            add("slots_alike", f"the states of {slot.name} are those of {before.name}")
    repeats = [token for token in faults.repeats if int(ids[token]) != int(ids[token - 1])]
    if repeats:
        add("tokens_alike", f"{len(repeats)} states repeat those of the token before, the first at token {repeats[0]}")
