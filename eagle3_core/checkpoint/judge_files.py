"""The judge on files: is everything there that the manifest lists, as far as sizes, headers and config tell?"""

import json
from pathlib import Path
from typing import Any

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, read_manifest
from eagle3_core.checkpoint.weights import RUNTIME_STATE, DrafterWeights
from eagle3_core.contract.drafter_keys import means_nothing
from eagle3_core.contract.headers import read_header
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.contract.weight_files import INDEX_NAME, SINGLE_NAME
from eagle3_core.errors import BadInput, UnreadableFile

CONFIG_NAME = "config.json"
_STATE_FILES = frozenset(
    (
        *("optimizer_state_dict.pt", "scheduler_state_dict.pt", RUNTIME_STATE),
        *("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
    )
)
"""Files of torch.save that hold no weights."""

_KIND_CODES = {
    "empty": "truncated_file",
    "too_short": "truncated_file",
    "cut": "truncated_file",
    "header_length": "truncated_file",
    "missing": "missing_file",
    "not_a_file": "missing_file",
    "unreadable": "missing_file",
    "trailing_bytes": "trailing_bytes",
    "lfs_pointer": "lfs_pointer",
    "pickle": "unsafe_pickle",
    "unsafe_pickle": "unsafe_pickle",
    "damaged_pickle": "damaged_pickle",
    "legacy_pickle": "legacy_pickle",
    "zip": "wrong_format",
    "gguf": "wrong_format",
    "hdf5": "wrong_format",
    "html": "wrong_format",
}


def add_unreadable(report: Report, error: UnreadableFile) -> None:
    """Note why a file could not be read."""
    report.add(_KIND_CODES.get(error.kind, "damaged_header"), error.detail, file=error.path, tensor=error.tensor)


def check_files(report: Report, directory: Path) -> Manifest | None:
    """Compare the directory with its manifest; returns the manifest where it is usable."""
    if (directory / "config.py").exists():
        report.add("custom_code", "config.py lies in the checkpoint", file=directory / "config.py")
    manifest = read_manifest(directory)
    if manifest is None:
        report.add("manifest_absent", f"no {MANIFEST_NAME}: sizes and digests cannot be checked")
        return None
    if isinstance(manifest, str):
        report.add("manifest_broken", manifest, file=directory / MANIFEST_NAME)
        return None
    for name, entry in sorted(manifest.files.items()):
        file = directory / name
        if not file.is_file():
            report.add("missing_file", f"{name} is listed in {MANIFEST_NAME} and missing", file=file)
        elif name == CONFIG_NAME and manifest.config is not None:
            _compare_config(report, file, entry, manifest.config)
        elif not (name in manifest.headers and _compare_header(report, file, manifest)):
            _compare_size(report, file, entry)
    for file in sorted(directory.iterdir()):
        if file.name not in manifest.files and file.name not in (MANIFEST_NAME, "config.py"):
            report.add("unlisted_file", f"{file.name} is not in {MANIFEST_NAME}", file=file)
    return manifest


def check_strays(report: Report, directory: Path, weights: DrafterWeights, manifest: Manifest | None) -> None:
    """Weight files beside those of the drafter, which programs load too or instead, and what an index leaves out."""
    files = weights.files
    for file in files:
        if manifest is not None and file.name not in manifest.files:
            what = f"{file.name} is what servers load, and was not there when the checkpoint was written"
            report.add("digest_differs", what, file=file)
    for name in weights.unlisted:
        entry = weights.entries[name]
        report.add(
            "index_differs", f"{entry.stored_name} lies in {entry.file.name} and is not in its index", file=entry.file
        )
    suffix, why = files[0].suffix, "and no index says which to load"
    beside = [file for file in sorted(directory.glob(f"*{suffix}")) if file not in files and file.name[0] != "."]
    if suffix == ".safetensors" and (directory / INDEX_NAME).exists():
        beside = [file for file in beside if file.name == SINGLE_NAME]
        why = f"and {INDEX_NAME} leaves it out: transformers reads it, servers the files of the index"
    for file in beside:
        if file.name not in _STATE_FILES:
            report.add("stray_weights", f"{file.name} lies beside {files[0].name} {why}", file=file)


def _compare_size(report: Report, file: Path, entry: FileEntry) -> bool:
    """Whether the size is another one."""
    size = file.stat().st_size
    if size != entry.size:
        word = "cut short" if size < entry.size else "too long"
        what = f"{file.name} is {word}: {size:,} bytes, {MANIFEST_NAME} says {entry.size:,}"
        report.add("size_differs", what, file=file)
    return size != entry.size


def _compare_header(report: Report, file: Path, manifest: Manifest) -> bool:
    """Names, dtypes and shapes against those that were written; False where the header cannot be read."""
    try:
        found = read_header(file).tensors
    except UnreadableFile:
        return False
    recorded = manifest.tensors.get(file.name, {})
    for name in sorted(recorded.keys() - found.keys()):
        report.add("digest_differs", f"{name} was written and is not there", file=file, tensor=name)
    for name, info in sorted(found.items()):
        entry = recorded.get(name)
        if entry is None:
            report.add("digest_differs", f"{name} is not what was written", file=file, tensor=name)
        elif (info.dtype, info.shape) != (entry.dtype, entry.shape):
            what = f"{name} is {info.dtype} {list(info.shape)}, was {entry.dtype} {list(entry.shape or ())}"
            report.add("digest_differs", what, file=file, tensor=name)
    return True


def _compare_config(report: Report, file: Path, entry: FileEntry, written: dict[str, Any]) -> None:
    """config.json by what it says, key by key; its order and white space mean nothing."""
    try:
        now = flat_config(read_json_object(file))
    except BadInput as error:
        if not _compare_size(report, file, entry):
            report.add("digest_differs", f"{error}".removeprefix(f"{file}: "), file=file)
        return
    then = flat_config(written)
    for key in changed_keys(now, then):
        code = "config_note" if means_nothing(key, now, then) else "config_edited"
        here, before = (json.dumps(side[key]) if key in side else "absent" for side in (now, then))
        report.add(code, f"{key} is {here}, was {before} when the checkpoint was written", file=file)


def flat_config(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        nested = isinstance(value, dict) and value
        flat |= flat_config(value, f"{before}{key}.") if nested else {f"{before}{key}": value}
    return flat


def changed_keys(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Keys of two flat configs that differ."""
    return sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
