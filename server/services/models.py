"""Model directories, read once for as long as nothing in them changes: the headers of a large one take a second, and a
request asks for them many times.
"""

import os
from functools import lru_cache
from pathlib import Path

from eagle3_core.contract.verifier_files import VerifierFiles, read_verifier_files
from eagle3_core.contract.weight_files import read_weight_files

KEPT = 8

Signature = tuple[tuple[str, int, int, int], ...]
"""Name, size, time of the last change and inode of every entry, links followed."""


def read_verifier(path: Path) -> VerifierFiles:
    """As `read_verifier_files`.

    Raises:
        BadInput, OSError: as that.
    """
    signature = _signature(path)
    return read_verifier_files(path) if signature is None else _verifier(path, signature)


def count_numbers(path: Path) -> int:
    """How many numbers the weight files of a model directory hold.

    Raises:
        BadInput, OSError: they cannot be read.
    """
    signature = _signature(path)
    return _count(path) if signature is None else _numbers(path, signature)


@lru_cache(KEPT)
def _verifier(path: Path, _signature: Signature) -> VerifierFiles:
    return read_verifier_files(path)


@lru_cache(KEPT)
def _numbers(path: Path, _signature: Signature) -> int:
    return _count(path)


def _count(path: Path) -> int:
    return sum(located.info.count for located in read_weight_files(path).tensors.values())


def _signature(path: Path) -> Signature | None:
    """None where something cannot be looked at."""
    try:
        with os.scandir(path) as entries:
            found = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return None
    return tuple(sorted((name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in found))
