"""The main job over HTTP, on a tiny verifier: prepare -> extract -> train -> validate -> convert -> evaluate."""

import json
from pathlib import Path
from typing import Any

from tests import tiny

STAGES = ("prepare", "extract", "train", "validate", "convert", "evaluate")
STATED = {
    *(
        "state",
        "reason",
        "health",
        "phase",
        "epoch",
        "epochs",
        "step",
        "steps",
        "loss",
        "accuracy",
        "lr",
        "tokens_per_s",
    ),
    *("elapsed_s", "eta_s", "epochs_done", "warnings", "last_checkpoint", "summary"),
}


def chain(root: Path) -> dict[str, Any]:
    """Each stage reads where the one before it will write."""
    verifier = str(tiny.make_verifier(root / "verifier"))
    params: dict[str, dict[str, Any]] = {
        "prepare": {"conversations": str(tiny.make_conversations(root / "train.jsonl", 12)), "draft_vocab_size": 48},
        "extract": {
            "prepared_dir": str(root / "prepare"),
            "aux_layer_ids": list(tiny.AUX_LAYER_IDS),
            "dtype": "float32",
        },
        "train": {
            "data_dir": str(root / "extract"),
            "vocab_map_dir": str(root / "prepare"),
            "epochs": 2,
            "lr": 3e-3,
            "max_seq_len": 128,
            "val_ratio": 0.2,
        },
        "validate": {"checkpoint": str(root / "train" / "1"), "previous": str(root / "train" / "0")},
        "convert": {"checkpoint": str(root / "train"), "to": "both"},
        "evaluate": {
            "checkpoint": str(root / "convert" / "both"),
            "prompts": str(tiny.make_conversations(root / "held-out.jsonl", 4)),
            "max_new_tokens": 16,
        },
    }
    return {
        "jobs": [
            {
                "name": stage,
                "stage": stage,
                "params": params[stage] | {"verifier": verifier, "output_dir": str(root / stage)},
                "depends_on": [STAGES[number - 1]] if number else [],
            }
            for number, stage in enumerate(STAGES)
        ]
    }


def test_from_conversations_to_an_acceptance_length(new_daemon: Any) -> None:
    daemon = new_daemon(OMP_NUM_THREADS="1")
    ids = {job["name"]: job["id"] for job in daemon.client.submit(chain(daemon.root))}
    jobs = {stage: daemon.wait_ended(ids[stage], limit_s=120) for stage in STAGES}
    assert {stage: job["state"] for stage, job in jobs.items()} == dict.fromkeys(STAGES, "succeeded"), jobs
    for job in jobs.values():
        assert job.keys() >= STATED
        assert (job["reason"], job["warnings"]) == (None, [])
        assert job["summary"]
        assert job["elapsed_s"] > 0

    train = jobs["train"]
    assert (train["epoch"], train["epochs"], train["step"], train["steps"]) == (1, 2, 20, 20)
    assert [len(epoch["train"]["accuracy"]) for epoch in train["epochs_done"]] == [3, 3]
    losses = [epoch["val"]["loss"] for epoch in train["epochs_done"]]
    assert losses[1] < losses[0], "nothing was learned"
    assert train["last_checkpoint"] == {"path": str(daemon.root / "train" / "1"), "verdict": "valid", "why": None}
    assert [one["verdict"] for one in daemon.client.checkpoints(ids["train"])] == ["valid", "valid"]
    assert json.loads((daemon.root / "validate" / "verdict.json").read_text())["verdict"] == "valid"
    assert sorted(path.name for path in (daemon.root / "train").iterdir() if not path.name.startswith(".")) == [
        "0",
        "1",
        "checkpoint_best",
    ]
    assert (daemon.root / "train" / "checkpoint_best").readlink() == Path("1")

    converted = jobs["convert"]["result"]
    assert converted["artifacts"] == {"checkpoint": str(daemon.root / "convert" / "both")}
    assert converted["data"]["verdict"] == "valid"
    assert {converted["data"]["servers"][server] for server in ("vllm-v1", "vllm-v2", "sglang")} == {"loads"}

    found = jobs["evaluate"]["result"]["data"]
    assert found == json.loads((daemon.root / "evaluate" / "acceptance.json").read_text())
    assert found["prompts_decoded"] == found["prompts_identical"] == 4
    assert found["tau_walk"] == found["tau_decoding"] >= 1.0
    assert found["rounds_walk"] == found["rounds_decoding"]
