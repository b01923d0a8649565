"""A libnvidia-ml.so.1 whose GPUs do what a file says, for the collector to load as it loads the real one."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "nvml.c"
GIB = 1 << 30


def compile_library(directory: Path) -> None:
    """Put the library into a directory, as a new file; skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make the library of the fake GPUs")
    made = directory / "made.so"
    command = [compiler, "-std=c11", "-D_DEFAULT_SOURCE", "-shared", "-fPIC", "-o", str(made), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    made.replace(directory / "libnvidia-ml.so.1")


class FakeNvml:
    """Eight GPUs of 80 GiB, until told otherwise. The lines of the file are explained in nvml.c."""

    def __init__(self, directory: Path, control: Path) -> None:
        self.directory = directory
        self._control = control
        self.tell()

    @property
    def environment(self) -> dict[str, str]:
        """What has a process load it."""
        return {"LD_LIBRARY_PATH": str(self.directory), "FAKE_NVML": str(self._control)}

    def tell(self, *lines: str, order: str = "0 1 2 3 4 5 6 7") -> None:
        """From now on, only this."""
        new = self._control.with_suffix(".new")
        new.write_text("\n".join([f"order {order}", *lines]) + "\n")
        new.replace(self._control)


def uuid(card: int) -> str:
    """Of a card."""
    return f"GPU-00000000-0000-4000-8000-{card:012d}"


def instance_uuid(card: int, number: int) -> str:
    """Of a MIG instance of a card."""
    return f"MIG-00000000-0000-5000-8000-{card:010d}{number:02d}"
