"""The judge's first level: what headers, sizes, names, shapes and config tell. No torch, and milliseconds at any size.

The checks stand in judge_files (completeness), judge_tensors (names, shapes), judge_map (d2t, t2d), judge_state
(optimizer, schedule) and judge_verifier (sizes of the verifier); judge.py goes on from what `inspect` returns.
"""

from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.checkpoint.findings import Report, Verdict
from eagle3_core.checkpoint.judge_files import CONFIG_NAME, add_unreadable, check_files, check_strays
from eagle3_core.checkpoint.judge_map import check_map
from eagle3_core.checkpoint.judge_state import OptimizerState, check_state
from eagle3_core.checkpoint.judge_tensors import check_config, check_names
from eagle3_core.checkpoint.judge_verifier import VerifierParts, check_against_verifier
from eagle3_core.checkpoint.manifest import Manifest
from eagle3_core.checkpoint.servability import tell_servers
from eagle3_core.checkpoint.weights import DrafterWeights, has_weights, open_drafter_weights
from eagle3_core.contract.drafter_files import WEIGHT_SUFFIXES, DrafterSource, describe_drafter
from eagle3_core.contract.other_models import ADAPTER_CONFIG, LORA, kind_by_tensors
from eagle3_core.errors import BadInput, CheckpointError, NameClash, NotADrafter, UnreadableFile


@dataclass(frozen=True)
class Inspected:
    """A checkpoint after its first level.

    path: the directory that is judged, or the one weight file.
    weights: its tensors; None where they could not be read.
    targets: verifier token of each draft id, where the map is sound.
    drafter: false for another kind of model, of which nothing but the weights is judged.
    """

    path: Path
    manifest: Manifest | None
    source: DrafterSource | None = None
    weights: DrafterWeights | None = None
    state: OptimizerState | None = None
    targets: Sequence[int] | None = None
    verifier: VerifierParts | None = None
    drafter: bool = True


def judge_quick(path: Path, *, verifier: Path | None = None, expect_drafter: bool = True) -> Verdict:
    """The verdict on a checkpoint as far as headers, sizes, names, shapes and config tell.

    Args:
        path: a checkpoint directory; an output directory, whose latest epoch is judged; or one weight file.
        verifier: directory of the verifier, to compare sizes and layer ids with.
        expect_drafter: false passes over what does not claim to be an EAGLE-3 drafter.
    """
    report = Report(path)
    found = inspect(report, path, verifier, expect_drafter)
    if found is not None and found.source is not None and found.weights is not None:
        tell_servers(report, found.path / CONFIG_NAME, found.source, found.weights, found.verifier)
    return report.verdict("quick")


def inspect(report: Report, path: Path, verifier: Path | None, expect_drafter: bool) -> Inspected | None:
    """Judge what can be judged without reading tensors; None where there is nothing more to judge."""
    try:
        if path.is_file() and path.suffix in WEIGHT_SUFFIXES:
            return Inspected(path, None, weights=_open(report, path), drafter=False)
        directory = checkpoint_directory(report, path)
        if directory is None:
            return None
        if not expect_drafter and _is_another_model(directory):
            what = "no EAGLE-3 drafter: files, headers and values were judged, names and shapes were not"
            report.add("not_a_drafter", what)
            manifest = check_files(report, directory)
            return Inspected(directory, manifest, weights=_open(report, directory), drafter=False)
        return _inspect_drafter(report, directory, verifier)
    except OSError as error:
        report.unreadable = True
        report.add("no_checkpoint", f"{error.filename or path} cannot be read: {error.strerror}")
        return None


def _inspect_drafter(report: Report, directory: Path, verifier: Path | None) -> Inspected:
    manifest = check_files(report, directory)
    source = _config(report, directory)
    weights = _open(report, directory)
    if weights is None:
        return Inspected(directory, manifest, source)
    kind = kind_by_tensors({name: entry.shape for name, entry in weights.entries.items()})
    if kind is not None:
        report.add("other_model", f"its tensors are those of {kind}", file=weights.files[0])
    check_strays(report, directory, weights, manifest)
    targets = parts = None
    if source is not None:
        check_config(report, directory, source, weights)
        sound = check_names(report, directory, source, weights) if kind is None else set()
        targets = check_map(report, source, weights, sound)
        if verifier is not None:
            parts = check_against_verifier(report, directory, source, verifier)
    state = check_state(report, directory, weights, manifest)
    return Inspected(directory, manifest, source, weights, state, targets, parts)


def _is_another_model(directory: Path) -> bool:
    """Whether a checkpoint says of itself that it is something else, or nothing at all."""
    if not (directory / "config.json").exists():
        return True
    try:
        describe_drafter(directory)
    except NotADrafter:
        return True
    except CheckpointError:
        return False
    return False


def checkpoint_directory(report: Report, path: Path) -> Path | None:
    """The directory to judge: the one given, or the latest epoch in it."""
    if not path.is_dir():
        report.unreadable = True
        what = "is neither a directory nor a .safetensors, .bin or .pt file" if path.exists() else "does not exist"
        report.add("no_checkpoint", f"{path} {what}")
        return None
    if (path / "config.json").exists() or has_weights(path):
        return path
    inside = [d for d in path.iterdir() if d.is_dir()]
    epochs = sorted((int(d.name), d) for d in inside if d.name.isascii() and d.name.isdigit())
    if not epochs:
        report.unreadable = True
        report.add("no_checkpoint", f"{path} holds no config.json, no weights and no epoch directory 0/, 1/ ...")
        return None
    others = sorted(d.name for d in inside if not (d.name.isascii() and d.name.isdigit()))
    passed = f"; passed over: {', '.join(others[:6])}" if others else ""
    latest = epochs[-1][1]
    what = f"{path} holds {len(epochs)} epochs; the latest, {latest.name}/, was judged{passed}"
    report.add("latest_judged", what)
    return latest


def _config(report: Report, directory: Path) -> DrafterSource | None:
    file = directory / "config.json"
    if not file.exists():
        if not any(f.code == "missing_file" and Path(f.file).name == file.name for f in report.findings):
            report.add("missing_file", "config.json is missing", file=file)
        return None
    try:
        source = describe_drafter(directory)
        if file.read_bytes().startswith(BOM_UTF8):
            report.add("bad_config", "begins with a byte order mark: servers take it for no JSON", file=file)
        return source
    except CheckpointError as error:
        code = "other_model" if isinstance(error, NotADrafter) else "bad_config"
        report.add(code, str(error).removeprefix(f"{file}: "), file=file)
        return None


def _open(report: Report, path: Path) -> DrafterWeights | None:
    try:
        return open_drafter_weights(path)
    except UnreadableFile as error:
        add_unreadable(report, error)
        report.unreadable = True
    except NameClash as error:
        report.add("name_clash", str(error).removeprefix(f"{path}: "), file=path)
    except BadInput as error:
        report.unreadable = True
        if (path / ADAPTER_CONFIG).exists():
            report.add("other_model", f"not an EAGLE-3 drafter: {LORA} ({ADAPTER_CONFIG})", file=path)
        report.add("missing_file", str(error).removeprefix(f"{path}: "), file=path)
    return None
