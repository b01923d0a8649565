"""The judge: is this checkpoint what a server and the next epoch need it to be?

It reads, compares and counts; it never runs code that lies in a checkpoint, and holds one piece of one tensor at a
time. The checks stand in judge_files (completeness, digests), judge_tensors (names, shapes, values), judge_map
(d2t, t2d), judge_state (optimizer, schedule) and judge_others (previous epoch, verifier).
"""

from pathlib import Path

from eagle3_core.checkpoint.findings import Finding, Report, Verdict
from eagle3_core.checkpoint.judge_files import add_unreadable, check_files
from eagle3_core.checkpoint.judge_map import check_map
from eagle3_core.checkpoint.judge_others import (
    EMBED_TOKENS,
    NOT_TRAINED,
    check_against_previous,
    check_against_verifier,
)
from eagle3_core.checkpoint.judge_state import check_state
from eagle3_core.checkpoint.judge_tensors import check_config, check_names, check_values
from eagle3_core.checkpoint.weights import RUNTIME_STATE, DrafterWeights, open_drafter_weights
from eagle3_core.contract.drafter_files import DrafterSource, describe_drafter
from eagle3_core.errors import BadInput, CheckpointError, NotADrafter, UnreadableFile

__all__ = ["Finding", "Verdict", "judge"]

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")


def judge(
    path: Path, *, previous: Path | None = None, verifier: Path | None = None, expect_drafter: bool = True
) -> Verdict:
    """The verdict on a checkpoint.

    Args:
        path: a checkpoint directory; an output directory, whose latest epoch is judged; or one weight file, of which
            only header and values are judged.
        previous: checkpoint of the epoch before; its weights must differ, its vocabulary map must not.
        verifier: directory of the verifier, to compare sizes, layer ids and embedding with.
        expect_drafter: false judges the weights alone of what is no EAGLE-3 drafter and does not claim to be one:
            files, headers, values, and against `previous`.
    """
    report = Report(path)
    if path.is_file() and path.suffix in _WEIGHT_SUFFIXES:
        weights = _open(report, path)
        if weights is not None:
            check_values(report, weights)
        return report.verdict()
    try:
        directory = _checkpoint_directory(report, path)
        if directory is not None:
            if not expect_drafter and _is_another_model(directory):
                _judge_weights(report, directory, previous)
            else:
                _judge_directory(report, directory, previous, verifier)
    except OSError as error:
        report.unreadable = True
        report.add("no_checkpoint", f"{error.filename or path} cannot be read: {error.strerror}")
    return report.verdict()


def _judge_directory(report: Report, directory: Path, previous: Path | None, verifier: Path | None) -> None:
    manifest = check_files(report, directory)
    source = _config(report, directory)
    weights = _open(report, directory)
    if weights is None:
        return
    check_values(report, weights)
    if source is not None:
        check_config(report, directory, source, weights)
        sound = check_names(report, directory, source, weights)
        check_map(report, source, weights, sound)
    trained = check_state(report, directory, weights, manifest)
    if previous is not None:
        moving = {EMBED_TOKENS} if source is not None and source.config.own_embedding else set()
        check_against_previous(report, directory, weights, previous, trained, NOT_TRAINED - (trained or moving))
    if verifier is not None and source is not None:
        check_against_verifier(report, directory, source, weights, verifier)


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


def _judge_weights(report: Report, directory: Path, previous: Path | None) -> None:
    report.add("not_a_drafter", "no EAGLE-3 drafter: files, headers and values were judged, names and shapes were not")
    check_files(report, directory)
    weights = _open(report, directory)
    if weights is None:
        return
    check_values(report, weights)
    if previous is not None:
        check_against_previous(report, directory, weights, previous, None, frozenset())


def _checkpoint_directory(report: Report, path: Path) -> Path | None:
    """The directory to judge: the one given, or the latest epoch in it."""
    if not path.is_dir():
        report.unreadable = True
        what = "is neither a directory nor a .safetensors, .bin or .pt file" if path.exists() else "does not exist"
        report.add("no_checkpoint", f"{path} {what}")
        return None
    weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin")) or (path / RUNTIME_STATE).exists()
    if weights or (path / "config.json").exists():
        return path
    epochs = sorted((int(d.name), d) for d in path.iterdir() if d.name.isascii() and d.name.isdigit() and d.is_dir())
    if not epochs:
        report.unreadable = True
        report.add("no_checkpoint", f"{path} holds no config.json, no weights and no epoch directory 0/, 1/ ...")
        return None
    report.add("latest_judged", f"{path} holds {len(epochs)} epochs; the latest, {epochs[-1][1].name}/, was judged")
    return epochs[-1][1]


def _config(report: Report, directory: Path) -> DrafterSource | None:
    file = directory / "config.json"
    if not file.exists():
        if not any(f.code == "missing_file" and Path(f.file).name == file.name for f in report.findings):
            report.add("missing_file", "config.json is missing", file=file)
        return None
    try:
        return describe_drafter(directory)
    except CheckpointError as error:
        report.add("bad_config", str(error).removeprefix(f"{file}: "), file=file)
        return None


def _open(report: Report, path: Path) -> DrafterWeights | None:
    try:
        return open_drafter_weights(path)
    except UnreadableFile as error:
        add_unreadable(report, error)
        report.unreadable = True
    except CheckpointError as error:
        clash = "two names" in str(error)
        report.unreadable = not clash
        report.add("name_clash" if clash else "missing_file", str(error).removeprefix(f"{path}: "), file=path)
    except BadInput as error:
        report.unreadable = True
        report.add("missing_file", str(error).removeprefix(f"{path}: "), file=path)
    return None
