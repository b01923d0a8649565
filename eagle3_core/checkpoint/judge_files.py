"""The judge on files: is everything there that the manifest lists, with the right size?"""

from pathlib import Path

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
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
        elif (size := file.stat().st_size) != entry.size:
            word = "cut short" if size < entry.size else "too long"
            report.add(
                "size_differs",
                f"{name} is {word}: {size:,} bytes, {MANIFEST_NAME} says {entry.size:,}",
                file=file,
            )
    for file in sorted(directory.iterdir()):
        if file.name not in manifest.files and file.name not in (MANIFEST_NAME, "config.py"):
            report.add("unlisted_file", f"{file.name} is not in {MANIFEST_NAME}", file=file)
    return manifest
