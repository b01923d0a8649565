"""manifest.json of a checkpoint: what was written, byte for byte. Standard library only.

    {"schema_version": 2, "kind": "eagle3-checkpoint", "epoch", "step", "extra",
     "files":   {name: {"bytes", "digest"}},                         every file but this one
     "headers": {weight file: digest},                               its first bytes, up to the first tensor
     "tensors": {weight file: {tensor: {"dtype", "shape", "digest"}}},
     "config":  {...}}                                               config.json, to name the key that was edited

Header and tensors fill a weight file without a hole, so that their digests alone vouch for every byte of it; a file
that was written anew, with other metadata or in another order, is still known by its tensors. Digests are
`algorithm:hex`. Version 1 had {"bytes", "sha256"}, a bare sha256 for each tensor, and neither headers nor config.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.errors import BadInput

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 2

_DIGEST = re.compile(r"(sha256|blake3):[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """One file as it was written: size, and digest as `algorithm:hex`."""

    size: int
    digest: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as it was written; dtype and shape are None in version 1."""

    dtype: str | None
    shape: tuple[int, ...] | None
    digest: str


@dataclass(frozen=True)
class Manifest:
    """A manifest of any version; `tensors` and `headers` by file name."""

    step: int | None
    extra: dict[str, Any]
    files: dict[str, FileEntry]
    headers: dict[str, str]
    tensors: dict[str, dict[str, TensorEntry]]
    config: dict[str, Any] | None


def read_manifest(path: Path) -> Manifest | str | None:
    """The manifest of a checkpoint directory; None where there is none; a sentence where it is broken."""
    file = path / MANIFEST_NAME
    if not file.is_file():
        there = file.exists() or file.is_symlink()
        return f"{MANIFEST_NAME} is not a regular file" if there else None
    try:
        return _parsed(read_json_object(file))
    except BadInput as error:
        return f"{MANIFEST_NAME}: {str(error).removeprefix(f'{file}: ')}"
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        return f"{MANIFEST_NAME}: {error}"


def _parsed(data: dict[str, Any]) -> Manifest:
    if not isinstance(data.get("files"), dict):
        raise ValueError("holds no list of files")
    version = data.get("schema_version")
    if type(version) is not int or not 1 <= version <= MANIFEST_VERSION:
        raise ValueError(f"schema_version {version!r} is unknown (up to {MANIFEST_VERSION} is read)")
    files = {name: _file(name, entry, version) for name, entry in data["files"].items()}
    step, extra = data.get("step"), data.get("extra")
    sections, config = data.get("tensors"), data.get("config")
    tensors = {
        file: {name: _tensor(entry, version) for name, entry in section.items()}
        for file, section in (sections.items() if isinstance(sections, dict) else ())
    }
    return Manifest(
        step=step if type(step) is int else None,
        extra=extra if isinstance(extra, dict) else {},
        files=files,
        headers={file: _digest(digest, version) for file, digest in (data.get("headers") or {}).items()},
        tensors=tensors,
        config=config if isinstance(config, dict) else None,
    )


def _tensor(entry: Any, version: int) -> TensorEntry:
    if version == 1:
        return TensorEntry(None, None, _digest(entry, version))
    return TensorEntry(str(entry["dtype"]), tuple(entry["shape"]), _digest(entry["digest"], version))


def _file(name: str, entry: Any, version: int) -> FileEntry:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"lists {name!r}, which is not a file of this directory")
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
        raise ValueError(f"lists {name} without its size")
    key = "sha256" if version == 1 else "digest"
    try:
        return FileEntry(entry["bytes"], _digest(entry.get(key), version))
    except ValueError as error:
        raise ValueError(f"lists {name} without its {key}") from error


def _digest(value: Any, version: int) -> str:
    digest = f"sha256:{value}" if version == 1 else value
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{value!r} is no digest")
    return digest
