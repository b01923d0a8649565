"""The peers' own code, each in a venv of its own under .venvs/, made on first use."""

import subprocess
import sys
from pathlib import Path

VENVS = Path(__file__).parents[1] / ".venvs"
SPECULATORS, SPECFORGE, RAY = "speculators-0.9.0", "specforge-0.2.0", "ray-2.60.0"

# Their own pins would bring a CUDA build of torch; what is listed is what training on a CPU imports.
_STEPS: dict[str, tuple[list[str], ...]] = {
    SPECULATORS: (
        ["torch==2.13.0", "transformers==5.19.0", "numpy", "safetensors", "openai", "datasets<=5.1"],
        ["--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0"],
        ["loguru", "aiohttp", "pydantic-settings", "rich", "typer", "psutil", "triton", "httpx"],
    ),
    SPECFORGE: (
        ["torch==2.13.0", "transformers==5.8.1", "numpy", "safetensors"],
        ["--no-deps", "specforge==0.2.0"],
        ["triton"],
    ),
    RAY: (["ray[default]==2.60.0"],),
}


def peer_python(name: str) -> Path:
    """The peer's interpreter."""
    venv = VENVS / name
    marker, wanted = venv / ".installed", repr(_STEPS[name])
    if not marker.exists() or marker.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        for packages in _STEPS[name]:
            subprocess.run([venv / "bin/python", "-m", "pip", "install", "-q", *packages], check=True)
        marker.write_text(wanted)
    return venv / "bin/python"
