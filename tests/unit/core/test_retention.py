"""Which checkpoints stay: the newest, the best, every so many; and what is never touched."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.checkpoint import write
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.params import TrainParams
from eagle3_core.training.resume import checkpoints, find_latest
from tests import makers, tiny
from tests.cases import make_case
from worker.context import StageContext
from worker.judge import BackgroundJudge
from worker.retention import BEST_LINK, best_link_fault, mark_best, needless
from worker.stages import train


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains in `tmp_path/out`, once more each time; returns the events of that attempt."""
    inputs = tiny.make_training_inputs(tmp_path)
    (tmp_path / "out").mkdir()

    def attempt(**fields: Any) -> list[dict[str, Any]]:
        file = tmp_path / f"events-{len(list(tmp_path.glob('events-*')))}"
        events = EventWriter(file)
        params = TrainParams(**(inputs | {"seed": 3} | fields))
        train.run(StageContext("job", params, tmp_path / "out", events, tmp_path / "control"))
        events.close()
        return [json.loads(line) for line in file.read_text().splitlines()]

    return attempt


def there(directory: Path) -> list[str]:
    return sorted((path.name for path in directory.iterdir() if path.name.isdigit()), key=int)


def written(parent: Path, epoch: int, val_loss: float | None = None) -> Path:
    """A checkpoint of a finished epoch, as a training leaves it."""
    return makers.write_drafter(parent, epoch, steps=epoch + 1, extra={"position": {}, "val_loss": val_loss})


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


def test_all_are_kept_unless_asked_otherwise(run, tmp_path):
    events = run(epochs=4)
    assert there(tmp_path / "out") == ["0", "1", "2", "3"]
    assert of(events, "checkpoint_removed") == []


def test_the_newest_the_best_and_every_third_are_kept(run, tmp_path):
    events = run(epochs=8, keep_last=2, keep_every=3, lr=5e-3)
    losses = {str(event["epoch"]): event["val"]["loss"] for event in of(events, "epoch")}
    best = min(losses, key=lambda epoch: losses[epoch])
    link = tmp_path / "out" / BEST_LINK
    assert link.readlink() == Path(best)
    assert set(there(tmp_path / "out")) == {"6", "7", "2", "5", best}
    removed = [Path(event["path"]).name for event in of(events, "checkpoint_removed")]
    assert sorted(removed) == sorted(set(losses) - set(there(tmp_path / "out")))
    assert all(judge(tmp_path / "out" / name).usable for name in there(tmp_path / "out"))


def test_a_later_attempt_keeps_the_best_of_an_earlier_one(run, tmp_path):
    run(epochs=2, keep_last=1)
    best = (tmp_path / "out" / BEST_LINK).readlink()
    manifest = tmp_path / "out" / best / "manifest.json"
    text = json.loads(manifest.read_text())
    text["extra"]["val_loss"] = 0.001  # nothing later comes near it
    manifest.write_text(json.dumps(text))
    run(epochs=4, keep_last=1)
    assert set(there(tmp_path / "out")) == {str(best), "3"}
    assert (tmp_path / "out" / BEST_LINK).readlink() == best


def test_without_validation_there_is_no_best(run, tmp_path):
    run(epochs=3, keep_last=1, val_ratio=0.0)
    assert there(tmp_path / "out") == ["2"]
    assert not (tmp_path / "out" / BEST_LINK).is_symlink()


def test_an_unsound_one_makes_nothing_needless_and_does_not_count(run, tmp_path, monkeypatch):
    whole = BackgroundJudge._judged

    def judged(self: Any, path: Path, size: int) -> Any:
        if path.name in ("1", "3"):
            (path / "model.safetensors").write_bytes(b"spoilt")
        return whole(self, path, size)

    monkeypatch.setattr(BackgroundJudge, "_judged", judged)
    events = run(epochs=4, keep_last=2, on_invalid_checkpoint="warn", val_ratio=0.0)
    verdicts = {Path(event["path"]).name: event["verdict"] for event in of(events, "verdict")}
    assert (verdicts["0"], verdicts["2"]) == ("valid", "valid"), "compared with the latest that was sound"
    assert verdicts["1"] in ("invalid", "unreadable")
    assert there(tmp_path / "out") == ["0", "2", "3"]
    assert find_latest(tmp_path / "out")[0].path.name == "2"


def test_removal_is_one_step_and_what_a_kill_leaves_is_cleared_and_told(run, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def killed(_path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("worker.checkpoints.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        run(epochs=2, keep_last=1, val_ratio=0.0)
    monkeypatch.undo()
    assert there(out) == ["1"]
    [left] = [path for path in out.iterdir() if path.name.startswith(".checkpoint-0-")]
    assert (left / "model.safetensors").exists()
    assert [path.name for _, path, _ in checkpoints(out)] == ["1"]
    events = run(epochs=3, keep_last=1, val_ratio=0.0)
    assert there(out) == ["2"]
    assert not left.exists()
    assert [Path(event["path"]).name for event in of(events, "checkpoint_removed")] == ["0", "1"]


def test_what_cannot_be_removed_is_no_reason_to_end(run, tmp_path, monkeypatch):
    def refused(_path: Path) -> Path:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr("worker.checkpoints.set_aside", refused)
    events = run(epochs=2, keep_last=1, val_ratio=0.0)
    assert there(tmp_path / "out") == ["0", "1"]
    assert [event["code"] for event in of(events, "warning")] == ["checkpoint_not_removed"]


def test_what_a_link_names_stays_and_links_are_no_checkpoints(tmp_path):
    for epoch in range(4):
        written(tmp_path, epoch)
    (tmp_path / "the one I serve").symlink_to("1")
    (tmp_path / "9").symlink_to("2")
    outside = written(tmp_path.parent / f"{tmp_path.name}-other", 8)
    (tmp_path / "8").symlink_to(outside)
    assert [path.name for _, path, _ in checkpoints(tmp_path)] == ["3", "2", "1", "0"]
    assert [path.name for path, _ in needless(tmp_path / "3", 1, None)] == ["0"]


def test_case_f05_the_best_link(tmp_path):
    case = make_case("F05", tmp_path)
    dangling, outside, plain = (case / name for name in "abc")
    assert best_link_fault(dangling) == f"{dangling / BEST_LINK} leads to 7, which is not there"
    assert "leads out of the output directory" in best_link_fault(outside)
    assert "is no link" in best_link_fault(plain)
    for directory in (dangling, outside, plain):
        shutil.rmtree(directory / "0", ignore_errors=True)
        written(directory, 0, 1.0)
        written(directory, 1, 2.0)
        marked = [mark_best(directory / name) for name in ("0", "1")]
        assert marked == [directory != plain, False]
        assert [path.name for path, _ in needless(directory / "1", 1, None)] == (["0"] if directory == plain else [])
    assert (case / "outside" / "keep.txt").read_text() == "must survive clean-up\n"
    assert (plain / BEST_LINK / "model.safetensors").exists()
    assert (dangling / BEST_LINK).readlink() == (outside / BEST_LINK).readlink() == Path("0")


def test_case_f04_what_a_full_disk_leaves(tmp_path):
    case = make_case("F04", tmp_path) / "ckpts"
    assert not judge(case / "1").usable
    written(case, 2)
    assert find_latest(case)[0].path.name == "2"
    (case / "2" / "optimizer_state_dict.pt").write_bytes(b"")
    written(case, 3)
    (case / "3" / "model.safetensors").write_bytes((case / "3" / "model.safetensors").read_bytes()[:4096])
    assert find_latest(case)[0] is None, "neither the cut one, nor that without an optimizer, nor strangers"
    assert write.clear_leftovers(case) == []
