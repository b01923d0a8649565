"""What the rows of a store should hold: the output of prepare, or a file of rows with token ids and mask."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from eagle3_core.data.prepared import load_prepared
from eagle3_core.data_check.findings import RowFindings
from eagle3_core.errors import BadData


@dataclass(frozen=True)
class ExpectedRows:
    """token_ids int64 [T] and loss_mask bool [T] of each row; the tokenizer's fingerprint where it is known."""

    source: Path
    rows: list[tuple[Tensor, Tensor]]
    tokenizer_fingerprint: str | None

    def compare(
        self, findings: RowFindings, file: Path, row: int, token_ids_T: Tensor, loss_mask_T: Tensor | None
    ) -> None:
        """Note where a row holds other token ids, or another mask, than were asked for."""
        if not 0 <= row < len(self.rows):
            what = f"row {row} is not among the {len(self.rows)} of {self.source}"
            findings.add("ids_differ", what, file=file)
            return
        wanted, mask = self.rows[row]
        if not torch.equal(wanted, token_ids_T):
            what = f"row {row}: {self._difference(row, token_ids_T)}"
            findings.add("ids_differ", what, file=file, tensor="token_ids")
        elif loss_mask_T is not None and not torch.equal(mask, loss_mask_T):
            first = int((mask != loss_mask_T).nonzero()[0])
            what = f"row {row}: the mask differs from that of {self.source}, first at position {first}"
            findings.add("mask_differs", what, file=file, tensor="loss_mask")

    @cached_property
    def _row_of_ids(self) -> dict[bytes, int]:
        """The first row that holds some token ids, by their digest."""
        return {_digest(ids): row for row, (ids, _) in reversed(list(enumerate(self.rows)))}

    def _difference(self, row: int, found: Tensor) -> str:
        wanted = self.rows[row][0]
        other = self._row_of_ids.get(_digest(found))
        if other is not None:
            return f"holds the token ids of row {other} of {self.source}"
        shared = min(len(wanted), len(found))
        unlike = (wanted[:shared] != found[:shared]).nonzero()
        if not len(unlike):
            return f"holds {len(found)} token ids, {len(wanted)} in {self.source}"
        first = int(unlike[0])
        return (
            f"token ids differ from those of {self.source} first at position {first}: {int(found[first])} here, "
            f"{int(wanted[first])} there"
        )


def read_expected(path: Path) -> ExpectedRows:
    """The rows of a prepare job's output directory, or of a JSON or JSONL file of {"input_ids", "loss_mask"}.

    Raises:
        BadData: it cannot be read, or a row is none; names file and row.
    """
    if path.is_dir():
        manifest, rows = load_prepared(path)
        pairs = [(row.token_ids_T, row.loss_mask_T) for row in rows]
        return ExpectedRows(path, pairs, manifest.tokenizer_fingerprint)
    return ExpectedRows(path, [_row(entry, f"{path}, row {n}") for n, entry in enumerate(_entries(path))], None)


def _digest(ids_T: Tensor) -> bytes:
    return blake3(ids_T.contiguous().numpy().tobytes()).digest(16)


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            entries = json.loads(text)
            assert isinstance(entries, list), "the text begins with a bracket"
            return entries
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path} holds no rows: {error}") from error


def _row(entry: object, where: str) -> tuple[Tensor, Tensor]:
    ids = entry.get("input_ids") if isinstance(entry, dict) else None
    mask = entry.get("loss_mask") if isinstance(entry, dict) else None
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise BadData(f"{where}: expected input_ids and a loss_mask of the same length")
    are_ids = all(type(token) is int and 0 <= token < 1 << 63 for token in ids)
    if not are_ids or not all(flag in (0, 1) for flag in mask):
        raise BadData(f"{where}: input_ids should be token ids, loss_mask 0 or 1")
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool)
