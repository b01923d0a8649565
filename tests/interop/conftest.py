"""speculators 0.9.0 in a venv of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venvs" / "speculators-0.9.0"
INSTALL = (
    ["torch==2.13.0", "transformers==5.19.0", "numpy", "safetensors", "openai", "datasets<=5.1"],
    ["--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0"],
    ["loguru", "aiohttp", "pydantic-settings", "rich", "typer", "psutil", "triton", "httpx"],
)


@pytest.fixture(scope="session")
def python() -> Path:
    """The peer's interpreter; its venv is made on first use."""
    marker, wanted = VENV / ".installed", repr(INSTALL)
    if not marker.exists() or marker.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        for packages in INSTALL:
            subprocess.run([VENV / "bin/python", "-m", "pip", "install", "-q", *packages], check=True)
        marker.write_text(wanted)
    return VENV / "bin/python"
