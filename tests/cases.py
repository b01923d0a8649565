"""Inputs from the generators of public bug reports, where they lie beside the repository."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"


def make_case(name: str, directory: Path) -> Path:
    """Run generator `name` into a directory of its own and return that; skips the test where there are none."""
    generator = CASES / f"{name}.py"
    if not generator.is_file():
        pytest.skip(f"no generator {name}.py beside the repository")
    out = directory / name
    subprocess.run([sys.executable, str(generator), str(out)], check=True, capture_output=True, timeout=60)
    return out


def peer_checkpoint(name: str) -> Path:
    """A real checkpoint written by a peer library; skips the test where there is none."""
    path = CASES.parent / "checkpoints" / name
    if not path.is_dir():
        pytest.skip(f"no checkpoint {name} beside the repository")
    return path
