"""The peers' interpreters."""

from pathlib import Path

import pytest

from benchmarks.peers import SPECULATORS, peer_python


@pytest.fixture(scope="session")
def python() -> Path:
    """That of speculators 0.9.0; its venv is made on first use."""
    return peer_python(SPECULATORS)
