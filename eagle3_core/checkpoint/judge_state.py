"""The judge on optimizer and schedule: could training go on from here?

AdamW                {"state": {i: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [{"params", "param_names"}]}
Muon + AdamW         a list of two such dicts                                  (speculators >= 0.5)
FSDP                 the same, keyed by parameter name instead of number
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_core.checkpoint.archive import Archive, ArchiveTensor, read_archive, scalar
from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.judge_files import add_unreadable
from eagle3_core.checkpoint.manifest import Manifest
from eagle3_core.checkpoint.weights import DrafterWeights, canonical_name
from eagle3_core.errors import UnreadableFile

OPTIMIZER_NAME = "optimizer_state_dict.pt"
SCHEDULER_NAME = "scheduler_state_dict.pt"

_FROZEN = frozenset({"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "d2t", "t2d"})
_SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq")
_NUMBERS = {"lr": "learning rate", "betas": "beta", "eps": "eps", "weight_decay": "weight decay"}
_EXACT = ("F32", "F64", "I64")


@dataclass
class OptimizerState:
    """Optimizer state by parameter: the name where the file gives one, else '#' and its number."""

    archive: Archive
    by_name: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    listed: list[str] = field(default_factory=list)
    settings: list[tuple[str, object]] = field(default_factory=list)
    named: bool = True

    @property
    def trained(self) -> set[str] | None:
        """Names of the parameters that are trained, where the file tells them."""
        return {canonical_name(name) for name in self.by_name} if self.named and self.by_name else None

    def last_step(self) -> float | None:
        """The highest step any parameter stands at."""
        return max(self.steps(), default=None)

    def steps(self) -> dict[float, str]:
        """Each step that a parameter stands at, and the first such parameter."""
        found: dict[float, str] = {}
        for name, values in self.by_name.items():
            step = values.get("step")
            step = scalar(step, self.archive.path) if isinstance(step, ArchiveTensor) else step
            if isinstance(step, (int, float)):
                found.setdefault(float(step), name)
        return found

    def tensors(self) -> list[tuple[str, str, ArchiveTensor]]:
        """(parameter, key, tensor) of each."""
        return [
            (name, str(key), value)
            for name, values in self.by_name.items()
            for key, value in values.items()
            if isinstance(value, ArchiveTensor)
        ]


def check_state(
    report: Report, directory: Path, weights: DrafterWeights, manifest: Manifest | None
) -> OptimizerState | None:
    """Judge both files by names, shapes and steps; returns the optimizer's state where it could be read."""
    _check_scheduler(report, directory / SCHEDULER_NAME)
    file = directory / OPTIMIZER_NAME
    if not file.exists():
        report.add("optimizer_absent", f"no {OPTIMIZER_NAME}", file=file)
        return None
    try:
        state = parse_state(read_archive(file))
    except UnreadableFile as error:
        add_unreadable(report, error)
        return None
    if state is None:
        report.add("optimizer_layout", f"{OPTIMIZER_NAME} has an unknown layout", file=file)
        return None
    if state.named:
        _check_named(report, file, state, weights)
    else:
        _check_shapes_only(report, file, state, weights)
    _check_steps(report, file, state, manifest)
    _check_numbers(report, file, state)
    return state


def _check_numbers(report: Report, file: Path, state: OptimizerState) -> None:
    """Settings and steps are numbers; a learning rate may be a tensor, other settings pairs."""
    for name, values in state.by_name.items():
        step = values.get("step", 0)
        if not isinstance(step, (int, float, ArchiveTensor)):
            report.add("optimizer_mismatch", f"the step of {name} is no number", file=file, tensor=name)
    for key, value in state.settings:
        for one in value if isinstance(value, (list, tuple)) else [value]:
            number = scalar(one, file) if isinstance(one, ArchiveTensor) else one
            if not isinstance(number, (int, float)) or not 0 <= number < math.inf:
                said = number if isinstance(number, float) else "no number"
                report.add("optimizer_mismatch", f"the optimizer's {_NUMBERS[key]} is {said}", file=file)


def _check_scheduler(report: Report, file: Path) -> None:
    if not file.exists():
        return
    try:
        data = read_archive(file).content
    except UnreadableFile as error:
        add_unreadable(report, error)
        return
    parts = data if isinstance(data, list) else [data]
    schedules = [part for part in parts if isinstance(part, Mapping)]
    if not parts or len(schedules) < len(parts):
        report.add("scheduler_layout", f"{SCHEDULER_NAME} holds {type(data).__name__}, not a state dict", file=file)
        return
    for key, value in ((key, value) for schedule in schedules for key, value in schedule.items()):
        if odd := [number for number in _listed(value) if isinstance(number, float) and not math.isfinite(number)]:
            report.add("scheduler_layout", f"{key} of {SCHEDULER_NAME} is {odd}", file=file)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def parse_state(archive: Archive) -> OptimizerState | None:
    """One view of any known layout; None for an unknown one."""
    result, data = OptimizerState(archive), archive.content
    for part in data if isinstance(data, list) else [data]:
        if not isinstance(part, Mapping):
            return None
        states, groups = part.get("state"), part.get("param_groups")
        if not isinstance(states, Mapping) or not isinstance(groups, list):
            return None
        names = _names(groups)
        if names is None:
            return None
        result.settings.extend((key, group[key]) for group in groups for key in _NUMBERS if group.get(key) is not None)
        result.named &= all(not name.startswith("#") for name in names.values())
        result.listed.extend(names.values())
        for key, values in states.items():
            if not isinstance(values, Mapping):
                return None
            result.by_name[names.get(key, f"#{key}")] = values
    return result


def _names(groups: list[Any]) -> dict[int | str, str] | None:
    """Key in `state` -> parameter name."""
    found: dict[int | str, str] = {}
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            return None
        params, names = group["params"], group.get("param_names")
        names = names if isinstance(names, list) and len(names) == len(params) else [None] * len(params)
        for key, name in zip(params, names, strict=True):
            if isinstance(key, str):
                found[key] = key
            elif type(key) is int:
                found[key] = name if isinstance(name, str) else f"#{key}"
            else:
                return None
    return found


def _check_named(report: Report, file: Path, state: OptimizerState, weights: DrafterWeights) -> None:
    """Each state belongs to a tensor of the checkpoint and has its shape."""
    for name, values in state.by_name.items():
        canonical = canonical_name(name)
        entry = weights.entries.get(canonical)
        if entry is None:
            if canonical not in _FROZEN:
                report.add(
                    "optimizer_mismatch",
                    f"optimizer state for {name}, which the weights do not hold",
                    file=file,
                    tensor=name,
                )
            continue
        for key in _SHAPED:
            value = values.get(key)
            if isinstance(value, ArchiveTensor) and value.shape != entry.shape:
                report.add(
                    "optimizer_mismatch",
                    f"optimizer state {key} of {name} has shape {list(value.shape)}, the tensor {list(entry.shape)}",
                    file=file,
                    tensor=name,
                )
    without = sorted(n for n in state.listed if n not in state.by_name and canonical_name(n) not in _FROZEN)
    if without:
        report.add(
            "optimizer_incomplete",
            f"{len(without)} of {len(state.listed)} parameters have no optimizer state: {', '.join(without[:4])}",
            file=file,
            tensor=without[0],
        )
    known = {canonical_name(name) for name in state.listed}
    absent = sorted(weights.entries.keys() - known - _FROZEN - {"lm_head.weight"})
    if absent:
        report.add(
            "optimizer_mismatch",
            f"the optimizer does not know {len(absent)} tensors of the checkpoint: {', '.join(absent[:4])}",
            file=file,
            tensor=absent[0],
        )


def _check_shapes_only(report: Report, file: Path, state: OptimizerState, weights: DrafterWeights) -> None:
    """Without names, each shape of the state must be that of some tensor not yet taken."""
    left = [entry.shape for name, entry in weights.entries.items() if name not in ("d2t", "t2d")]
    for name, values in state.by_name.items():
        shape = next((v.shape for key in _SHAPED if isinstance(v := values.get(key), ArchiveTensor)), None)
        if shape is None:
            continue
        if shape not in left:
            report.add(
                "optimizer_mismatch",
                f"optimizer state {name} has shape {list(shape)}, which no tensor left over has",
                file=file,
                tensor=name,
            )
            return
        left.remove(shape)
    if len(state.by_name) < len(state.listed):
        report.add(
            "optimizer_incomplete",
            f"{len(state.listed) - len(state.by_name)} of {len(state.listed)} parameters have no optimizer state",
            file=file,
        )


def _check_steps(report: Report, file: Path, state: OptimizerState, manifest: Manifest | None) -> None:
    """All parameters were stepped together, and as often as the manifest says."""
    steps = state.steps()
    counters = (values.get("step") for values in state.by_name.values())
    exact = all(step.dtype in _EXACT for step in counters if isinstance(step, ArchiveTensor))
    if len(steps) > 1:
        text = ", ".join(f"{name} at {step:g}" for step, name in sorted(steps.items())[:3])
        report.add("optimizer_stale", f"parameters stand at different steps: {text}", file=file)
    elif steps and exact and manifest is not None and manifest.step is not None:
        step = next(iter(steps))
        if step != manifest.step:
            report.add(
                "optimizer_stale", f"optimizer stands at step {step:g}, the manifest at {manifest.step}", file=file
            )
