"""The judge on files: is everything there that the manifest lists, byte for byte."""

import json
import re
from pathlib import Path
from typing import Any

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.write import MANIFEST_NAME, MANIFEST_VERSION, file_digest, tensor_digests
from eagle3_core.errors import UnreadableFile

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
    "zip": "wrong_format",
    "gguf": "wrong_format",
    "hdf5": "wrong_format",
    "html": "wrong_format",
}
_MAX_MANIFEST_BYTES = 64_000_000
_SHA256 = re.compile(r"[0-9a-f]{64}")


def add_unreadable(report: Report, error: UnreadableFile) -> None:
    """Note why a file could not be read."""
    report.add(_KIND_CODES.get(error.kind, "damaged_header"), error.detail, file=error.path, tensor=error.tensor)


def check_files(report: Report, directory: Path) -> dict[str, Any] | None:
    """Compare the directory with its manifest; returns the manifest where it is usable."""
    if (directory / "config.py").exists():
        report.add("custom_code", "config.py lies in the checkpoint", file=directory / "config.py")
    manifest = _manifest(report, directory)
    if manifest is None:
        return None
    for name, entry in sorted(manifest["files"].items()):
        _check_file(report, directory / name, entry, manifest)
    for file in sorted(directory.iterdir()):
        if file.name not in manifest["files"] and file.name not in (MANIFEST_NAME, "config.py"):
            report.add("unlisted_file", f"{file.name} is not in {MANIFEST_NAME}", file=file)
    return manifest


def _manifest(report: Report, directory: Path) -> dict[str, Any] | None:
    file = directory / MANIFEST_NAME
    if not file.exists():
        report.add("manifest_absent", f"no {MANIFEST_NAME}: sizes and digests cannot be checked")
        return None
    try:
        with file.open("rb") as opened:
            manifest = json.loads(opened.read(_MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        report.add("manifest_broken", f"{MANIFEST_NAME} cannot be read: {error}", file=file)
        return None
    fault = _manifest_fault(manifest)
    if fault is not None:
        report.add("manifest_broken", f"{MANIFEST_NAME}: {fault}", file=file)
        return None
    assert isinstance(manifest, dict)
    return manifest


def _manifest_fault(manifest: object) -> str | None:
    """What is wrong with the manifest itself, if anything."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return "holds no list of files"
    version = manifest.get("schema_version")
    if type(version) is not int or not 1 <= version <= MANIFEST_VERSION:
        return f"schema_version {version!r} is unknown (up to {MANIFEST_VERSION} is read)"
    for name, entry in manifest["files"].items():
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            return f"lists {name!r}, which is not a file of this directory"
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
            return f"lists {name} without its size"
        if not isinstance(entry.get("sha256"), str) or not _SHA256.fullmatch(entry["sha256"]):
            return f"lists {name} without its sha256"
    return None


def _check_file(report: Report, file: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> None:
    if not file.is_file():
        report.add("missing_file", f"{file.name} is listed in {MANIFEST_NAME} and missing", file=file)
        return
    size = file.stat().st_size
    if size != entry["bytes"]:
        word = "cut short" if size < entry["bytes"] else "too long"
        report.add(
            "size_differs",
            f"{file.name} is {word}: {size:,} bytes, {MANIFEST_NAME} says {entry['bytes']:,}",
            file=file,
        )
        return
    try:
        digest = file_digest(file)
    except OSError as error:
        report.add("missing_file", f"{file.name} cannot be read: {error.strerror}", file=file)
        return
    if digest != entry["sha256"]:
        _add_changed(report, file, manifest)


def _add_changed(report: Report, file: Path, manifest: dict[str, Any]) -> None:
    """Name the tensors whose bytes changed, or the file where no tensor can be named."""
    sections = manifest.get("tensors")
    recorded = sections.get(file.name) if isinstance(sections, dict) else None
    changed: list[str] = []
    if isinstance(recorded, dict):
        try:
            found = tensor_digests(file)
        except UnreadableFile:
            found = {}
        changed = sorted(name for name, digest in found.items() if recorded.get(name) != digest)
    for name in changed:
        report.add("digest_differs", f"{name}: bytes differ from what was written", file=file, tensor=name)
    if not changed:
        what = "its header differs" if isinstance(recorded, dict) and file.suffix == ".safetensors" else "bytes differ"
        report.add("digest_differs", f"{file.name}: {what} from what was written", file=file)
