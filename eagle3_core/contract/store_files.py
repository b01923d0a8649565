"""index.json of a hidden-state store: what its states are, and where each row lies. The layout: data/store.py."""

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3_core.errors import BadData

INDEX = "index.json"

UNFINISHED = "unfinished.jsonl"
"""Until the index is there, what it will say: its `meta` in the first line, then a line for each whole shard."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoreMeta(_Frozen):
    """What the states of a store are. `layer_ids` are aux ids, id k being the state entering layer k.

    `float8_e4m3` states are bytes and a power of two for each token and layer; see data/fp8.py.
    `output_fingerprint` is of the verifier's embedding, head and final norm; stores written before it have none.
    """

    verifier: str
    config_fingerprint: str
    output_fingerprint: str | None = None
    tokenizer_fingerprint: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    layer_ids: tuple[int, ...]
    layer_id_convention: Literal["entering"] = "entering"
    last_layer_id: int
    last_state: Literal["pre_norm", "post_norm"] = "pre_norm"
    dtype: Literal["float32", "bfloat16", "float8_e4m3"]

    def contradiction(self, other: "StoreMeta") -> str | None:
        """How states of `other` differ in meaning from these, or None. Where a verifier lies means nothing."""
        mine, theirs = dict(self), dict(other)
        passed = {"verifier"}
        if self.output_fingerprint is None or other.output_fingerprint is None:
            passed.add("output_fingerprint")
        differing = [name for name in mine if name not in passed and mine[name] != theirs[name]]
        return "; ".join(f"{name} {theirs[name]!r} instead of {mine[name]!r}" for name in differing) or None


class RowEntry(_Frozen):
    """Where one row lies. `row` is its number in the prepared data, `prompt` a digest of what precedes its answer."""

    row: int
    start: int = Field(ge=0)
    length: int = Field(ge=1)
    prompt: str


class ShardEntry(_Frozen):
    """One shard file, with one of the digests. Version 1 noted a sha256."""

    file: str
    bytes: int
    blake3: str | None = None
    sha256: str | None = None
    rows: tuple[RowEntry, ...]

    @model_validator(mode="after")
    def _has_a_digest(self) -> Self:
        if self.blake3 is None and self.sha256 is None:
            raise ValueError(f"{self.file} has neither a blake3 nor a sha256")
        return self


class StoreIndex(_Frozen):
    """index.json."""

    format: Literal["eyas-hidden-states"] = "eyas-hidden-states"
    schema_version: Literal[1, 2] = 2
    meta: StoreMeta
    shards: tuple[ShardEntry, ...] = Field(min_length=1)


def read_index(directory: Path) -> StoreIndex:
    """The index of a finished store; no shard is opened.

    Raises:
        BadData: it is missing, or not an index.
    """
    path = directory / INDEX
    try:
        return StoreIndex.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise BadData(f"{path} is missing: {directory} is not a finished hidden-state store; run extract") from None
    except (ValidationError, json.JSONDecodeError) as error:
        raise BadData(f"{path} is not an index of a hidden-state store: {error}") from error
