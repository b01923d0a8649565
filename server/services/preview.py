"""The first rows of a prepare job as it would make them, asked of a process that may load tokenizers."""

import threading
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from eagle3_core.contract.params import PrepareParams, StageParams
from server.system import host

LIMIT_S = 60.0
"""How long it may take: importing takes seconds, on a busy machine many."""

_ONE_AT_A_TIME = threading.Lock()
"""Each takes half a gigabyte."""


class PreviewRow(BaseModel):
    """A row as it would be prepared."""

    row: int = Field(description="line of the file")
    tokens: int
    supervised: int = Field(description="tokens that are trained on")
    parts: list[tuple[str, bool]] = Field(description="pieces of its text, cut short, and whether each is trained on")
    left_out: str | None = Field(description="why it would be left out")


class Preview(BaseModel):
    """The first rows, or why there are none."""

    rows: list[PreviewRow]
    trouble: str | None


def preview_of(params: StageParams, python: Path) -> Preview | None:
    """What prepare would make of the first rows; None for other stages, and before its inputs are there."""
    if not isinstance(params, PrepareParams) or not _are_there(params):
        return None
    if params.allow_remote_code:
        return Preview(rows=[], trouble="the tokenizer is code of the verifier's, which only a job runs")
    if not _ONE_AT_A_TIME.acquire(timeout=LIMIT_S):
        return Preview(rows=[], trouble="other previews are being made")
    try:
        asked = [params.verifier, params.conversations, str(params.max_seq_len)]
        answer = host.ask([str(python), "-P", "-m", "worker.preview", *asked], LIMIT_S)
    finally:
        _ONE_AT_A_TIME.release()
    rows: list[dict[str, Any]] = answer.value or []
    return Preview(rows=[PreviewRow.model_validate(row) for row in rows], trouble=answer.trouble)


def _are_there(params: PrepareParams) -> bool:
    return Path(params.verifier).is_dir() and Path(params.conversations).is_file()
