"""What tests of the judge share: checkpoints as others ship them, changed, and a look at the findings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_core.checkpoint.findings import Finding, Verdict
from tests.makers import write_config, write_drafter

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer_state_dict.pt"


def foreign(tmp_path: Path, change: Callable[[dict[str, Tensor]], object] = lambda _: None, **config: Any) -> Path:
    """The same drafter as others ship it, without a manifest or an optimizer, changed."""
    source = write_drafter(tmp_path / "source")
    path = tmp_path / "foreign"
    settings = json.loads((source / "config.json").read_text()) | config
    write_config(path, {key: value for key, value in settings.items() if value is not ...})
    tensors = load_file(source / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)
    return path


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


def drop(*names: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def found(verdict: Verdict, code: str) -> Finding:
    matching = [finding for finding in verdict.findings if finding.code == code]
    assert matching, verdict.to_dict()
    return matching[0]


def loud(verdict: Verdict) -> list[str]:
    return [finding.code for finding in verdict.findings if finding.severity != "info"]
