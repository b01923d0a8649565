"""Examples in the OpenAPI document, by operation id."""

from typing import Any

_TRAIN = {
    "name": "drafter",
    "stage": "train",
    "params": {"verifier": "/models/v", "data_dir": "/data/states", "vocab_map_dir": "/data/prepared", "epochs": 5},
    "labels": {"model": "v"},
}
_PIPELINE = {
    "name": "drafter-of-v",
    "defaults": {"params": {"verifier": "/models/v"}},
    "stages": {
        "prepare": {"params": {"conversations": "/data/conversations.jsonl"}},
        "extract": {"params": {"prepared_dir": "${prepare.output_dir}"}},
        "train": {"params": {"data_dir": "${extract.output_dir}", "vocab_map_dir": "${prepare.output_dir}"}},
    },
}

REQUESTS: dict[str, dict[str, Any]] = {
    "submitJobs": {
        "job": _TRAIN,
        "chain": {
            "jobs": [
                {
                    "name": "prepare",
                    "stage": "prepare",
                    "params": {
                        "verifier": "/models/v",
                        "conversations": "/data/conversations.jsonl",
                        "output_dir": "/data/prepared",
                    },
                },
                {
                    "name": "extract",
                    "stage": "extract",
                    "depends_on": ["prepare"],
                    "params": {"verifier": "/models/v", "prepared_dir": "/data/prepared"},
                },
            ]
        },
    },
    "submitPipeline": {"pipeline": _PIPELINE},
    "cancelJob": {"quickly": {"grace_s": 5, "checkpoint": False}},
    "cancelPipeline": {"quickly": {"grace_s": 5, "checkpoint": False}},
    "pauseJob": {"in a minute": {"grace_s": 60}},
    "createToken": {"for a reader": {"name": "dashboard", "scope": "read", "days": 30}},
}
"""Of bodies that are sent."""

ANSWERS: dict[str, dict[str, Any]] = {
    "submitJobs": {"jobs": [{"id": "k7m2p9qxwz", "name": "drafter", "state": "queued"}]},
    "retryJob": {"id": "k7m2p9qxwz", "state": "queued", "attempts": 1},
    "deleteJob": {
        "id": "k7m2p9qxwz",
        "deleted": False,
        "paths": ["/home/u/.local/state/eyas/jobs/k7m2p9qxwz"],
        "kept": ["/data/checkpoints"],
        "bytes": 1_310_720,
        "confirm": "9f2b6c1d0e8a4735",
    },
    "getStats": {
        "jobs": {
            "queued": 2,
            "starting": 0,
            "running": 1,
            "stopping": 0,
            "paused": 0,
            "succeeded": 40,
            "failed": 3,
            "cancelled": 1,
        },
        "queue_length": 2,
        "oldest_queued_s": 512.5,
        "days": 7.0,
        "ended": {"failed": 1, "succeeded": 9},
        "reasons": {"out_of_gpu_memory": 1},
        "gpu_hours": 71.25,
    },
    "getHealth": {"status": "ok", "version": "0.1.0"},
    "makeLoginLink": {"url": "http://127.0.0.1:8765/login?code=..."},
}
"""Of the usual answer."""


def add(operation: dict[str, Any]) -> None:
    """Put the examples of an operation where the document has them."""
    name = operation["operationId"]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        if name in REQUESTS:
            content["examples"] = {title: {"value": value} for title, value in REQUESTS[name].items()}
    if name in ANSWERS:
        usual = operation["responses"].get("201") or operation["responses"].get("202") or operation["responses"]["200"]
        usual["content"]["application/json"]["example"] = ANSWERS[name]
