"""The output of prepare: every row's tokens and mask in one file, and a manifest that says what they are.

<dir>/rows.safetensors       input_ids int32 [n], loss_mask bool [n], offsets int64 [rows + 1]
<dir>/vocab_map.safetensors  d2t, t2d, token_counts
<dir>/report.json            rows read, kept and left out, by reason, with the first lines of each
<dir>/prepared.json          prompts, sizes, fingerprints; written last
"""

import contextlib
import os
import shutil
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

import torch
from safetensors.torch import load_file

from eagle3_core.contract.headers import header_bytes, read_header
from eagle3_core.contract.jobdir import whole_file, write_whole
from eagle3_core.contract.prepared_files import MANIFEST, PreparedManifest, load_manifest
from eagle3_core.data.conversations import TokenRow
from eagle3_core.errors import BadData

ROWS = "rows.safetensors"
COPY_BYTES = 1 << 20


class RowWriter:
    """Writes rows.safetensors row by row; what it needs memory for is eight bytes a row.

    Ids and mask go into a file each, which are put together at the end: the format wants whole tensors, one behind the
    other. Files that a killed process leaves behind are named as those of `write_whole`, and removed like them.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / ROWS
        self._offsets = array("q", [0])
        self._ids = self._open("input_ids")
        self._mask = self._open("loss_mask")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._ids, self._mask):
            with contextlib.suppress(
                OSError
            ):  # a full disk was met before, or what is left in the buffer is not wanted
                file.close()
            Path(file.name).unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def tokens(self) -> int:
        """Tokens of all rows so far."""
        return self._offsets[-1]

    def add(self, token_ids: "array[int]", loss_mask: bytes) -> None:
        """Append one row: int32 token ids and, of the same length, bytes 0 and 1.

        Raises:
            OSError: the disk is full or the like; names the file.
        """
        with _naming(self._path):
            self._ids.write(token_ids)
            self._mask.write(loss_mask)
        self._offsets.append(self.tokens + len(token_ids))

    def finish(self) -> None:
        """Write rows.safetensors.

        Raises:
            OSError: the disk is full or the like; names the file.
        """
        with whole_file(self._path) as file:
            # Aligned tensors come first.
            tokens = [self.tokens]
            tensors = {
                "offsets": ("I64", [len(self._offsets)]),
                "input_ids": ("I32", tokens),
                "loss_mask": ("BOOL", tokens),
            }
            file.write(header_bytes(tensors))
            file.write(self._offsets.tobytes())
            for part in (self._ids, self._mask):
                with _naming(self._path):
                    part.seek(0)  # writes what was held back
                shutil.copyfileobj(part, file, COPY_BYTES)

    def _open(self, name: str) -> BinaryIO:
        return self._path.with_name(f".{name}.{os.getpid()}.tmp").open("w+b")


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error


def save_manifest(directory: Path, manifest: PreparedManifest) -> None:
    """Write prepared.json; call it last."""
    write_whole(directory / MANIFEST, manifest.model_dump_json(indent=1).encode())


def load_prepared(directory: Path) -> tuple[PreparedManifest, list[TokenRow]]:
    """Manifest and rows of a finished prepare job.

    Raises:
        BadData: a file is missing or damaged, or rows and manifest disagree.
    """
    manifest = load_manifest(directory)
    read_header(directory / ROWS)
    tensors = load_file(directory / ROWS)
    kinds = {"input_ids": torch.int32, "loss_mask": torch.bool, "offsets": torch.int64}
    for name, dtype in kinds.items():
        if name not in tensors or tensors[name].dtype != dtype or tensors[name].dim() != 1:
            raise BadData(f"{directory / ROWS}: tensor {name} should be a one-dimensional {dtype}; prepare again")
    offsets, ids, mask = tensors["offsets"].tolist(), tensors["input_ids"].to(torch.int64), tensors["loss_mask"]
    if len(offsets) != len(manifest.prompts) + 1 or not len(ids) == len(mask) == manifest.tokens:
        raise BadData(
            f"{directory / ROWS}: {len(offsets) - 1} rows, {len(ids)} input_ids and {len(mask)} loss_mask, {MANIFEST} "
            f"says {len(manifest.prompts)} rows of {manifest.tokens} tokens; prepare again"
        )
    if offsets[0] != 0 or offsets[-1] != len(ids) or offsets != sorted(set(offsets)):
        raise BadData(f"{directory / ROWS}: tensor offsets does not divide {len(ids)} tokens into rows; prepare again")
    return manifest, [
        TokenRow(ids[start:end], mask[start:end], prompt)
        for start, end, prompt in zip(offsets, offsets[1:], manifest.prompts, strict=False)
    ]
