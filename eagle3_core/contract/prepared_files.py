"""prepared.json, the manifest of a prepare job's output. The files beside it: data/prepared.py."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle3_core.errors import BadData

MANIFEST = "prepared.json"


class PreparedManifest(BaseModel):
    """prepared.json. `lines` are the line numbers of the rows, `dropped` counts the lines left out, by reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["eyas-prepared"] = "eyas-prepared"
    schema_version: Literal[1] = 1
    verifier: str
    tokenizer_fingerprint: str
    conversations: str
    max_seq_len: int
    draft_vocab_size: int
    tokens: int
    supervised_tokens: int
    vocab_coverage: float
    dropped: dict[str, int]
    lines: list[int]
    prompts: list[str]


def load_manifest(directory: Path) -> PreparedManifest:
    """The manifest of a finished prepare job.

    Raises:
        BadData: it is missing or damaged.
    """
    path = directory / MANIFEST
    try:
        return PreparedManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise BadData(f"{path} is missing: {directory} is not the output of a finished prepare job") from None
    except ValidationError as error:
        raise BadData(f"{path} is not a manifest of prepare: {error}") from error
