"""speculators 0.9.0's own trainer under `external`: epoch, step, loss, ETA and verdicts, as for our own training."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.interop.test_speculators import make_checkpoint

pytestmark = pytest.mark.interop

DRIVER = Path(__file__).with_name("speculators_trainer_driver.py")
LIMIT_S = 120.0


@pytest.fixture
def daemon(tmp_path: Path, daemon_class: Any, python: Path) -> Iterator[Any]:
    root = tmp_path / "root"
    root.mkdir()
    made = daemon_class(tmp_path / "state", root, {"EYAS_EXTERNAL_PROGRAMS": json.dumps([str(python)])}).start()
    yield made
    made.close()


def test_speculators_own_trainer_is_watched_like_ours(daemon: Any, python: Path, wait_for: Any) -> None:
    root = daemon.root
    verifier, gates, output = tiny.make_verifier(root / "verifier"), root / "gates", root / "output"
    gates.mkdir()
    source = make_checkpoint(root / "source", verifier, 0, {})
    argv = [str(python), str(DRIVER), str(source), str(output / "checkpoints"), str(gates)]
    params = {"argv": argv, "output_dir": str(output), "verifier": str(verifier), "expect_drafter": True}
    [stored] = daemon.client.submit({"name": "peer", "stage": "external", "params": params})

    def job() -> dict[str, Any]:
        found = dict(daemon.client.job(stored["id"]))
        assert found["state"] in ("queued", "starting", "running"), found
        return found

    first = wait_for(lambda: (now := job())["step"] == 2 and now, LIMIT_S, "two steps")
    assert (first["epoch"], first["epochs"], first["steps"], first["phase"]) == (0, 3, None, "training")
    assert first["loss"] > 0 and first["lr"] > 0 and first["tokens_per_s"] > 0 and len(first["accuracy"]) == 2
    assert "epoch 1 of 3, 2 steps, loss" in first["summary"]
    (gates / "0").touch()
    second = wait_for(lambda: (now := job())["step"] == 6 and now["last_checkpoint"] and now, LIMIT_S, "an epoch")
    assert (second["epoch"], second["epochs"], second["steps"]) == (1, 3, 12)
    assert second["eta_s"] > 0 and "epoch 2 of 3" in second["summary"]
    [done] = second["epochs_done"]
    assert done["train_s"] > 0 and done["train"]["loss"] > 0 and done["val"]["loss"] > 0
    judged = wait_for(lambda: (now := job())["last_checkpoint"]["verdict"] and now, LIMIT_S, "a verdict")
    assert judged["last_checkpoint"] == {"path": str(output / "checkpoints/0"), "verdict": "valid", "why": None}
    (gates / "1").touch()
    (gates / "2").touch()
    ended = daemon.wait_ended(stored["id"], LIMIT_S)
    assert ended["state"] == "succeeded", ended
    assert [one["epoch"] for one in ended["epochs_done"]] == [0, 1, 2]
    assert (ended["step"], ended["steps"]) == (12, 12)
    checkpoints = daemon.client.checkpoints(stored["id"])
    assert [(Path(one["path"]).name, one["epoch"], one["step"]) for one in checkpoints] == [
        ("0", 0, 4),
        ("1", 1, 8),
        ("2", 2, 12),
    ]
    assert {one["verdict"] for one in checkpoints} == {"valid"}, checkpoints
