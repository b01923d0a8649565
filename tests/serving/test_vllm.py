"""What we write is served by a real vLLM as it was trained; the faults that cost most acceptance, measured on it.

test_rules.py holds every rule to what vLLM's engine does, without the server and with tiny models.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_core.checkpoint.convert import convert
from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.quick import inspect
from eagle3_core.checkpoint.serving_facts import facts_of
from eagle3_core.contract.params import ServedFormat
from eagle3_core.evaluation.rounds import RoundCounts
from tests.conftest import WaitFor
from tests.judging import WEIGHTS, drop, put
from tests.serving.cases import absolute
from tests.serving.conftest import Decoding
from tests.serving.tiny import judged
from tests.serving.vllm import Served, serve

pytestmark = pytest.mark.serving

CLOSE = 0.03
"""Two programs that compute the same in float32 may still choose differently between two tokens of equal likelihood."""

Right = tuple[list[list[int]], RoundCounts]
Serve = Callable[[Path], Served]
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def formats(trained: Path, verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[ServedFormat, Path]:
    """The demo's drafter as each format that vLLM reads."""
    root = tmp_path_factory.mktemp("formats")
    targets: tuple[ServedFormat, ...] = ("vllm", "speculators", "both")
    for target in targets:
        done = convert(trained, root / target, target, verifier=verifier)
        assert done.verdict.verdict == "valid", done.to_dict()
    return {target: root / target for target in targets}


@pytest.fixture
def served(verifier: Path, prompts: list[list[int]], tmp_path: Path, wait_for: WaitFor) -> Serve:
    return lambda path: serve(verifier, path, prompts, tmp_path / "server", wait_for)


def spoil(source: Path, target: Path, change: Change, config: dict[str, Any]) -> Path:
    """A copy with other tensors or config keys; ... takes a key out."""
    shutil.copytree(source, target)
    (target / "manifest.json").unlink()
    settings = json.loads((target / "config.json").read_text()) | config
    settings = {key: value for key, value in settings.items() if value is not ...}
    (target / "config.json").write_text(json.dumps(settings))
    tensors = load_file(target / WEIGHTS)
    change(tensors)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("target", ["vllm", "speculators", "both"])
def test_what_we_write_is_served_as_it_was_trained(
    formats: dict[ServedFormat, Path], verifier: Path, right: Right, served: Serve, target: ServedFormat
) -> None:
    texts, rounds = right
    done = served(formats[target])
    assert judged(formats[target], verifier, "v1").outcome == "loads"
    assert done.answered, done.log
    print(f"{target}: {done.acceptance_length} by vLLM in {done.rounds} rounds, {rounds.acceptance_length} by decoding")
    assert done.acceptance_length == pytest.approx(rounds.acceptance_length, abs=CLOSE)
    assert sum(one == other for one, other in zip(done.texts, texts, strict=True)) >= len(texts) - 1


FAULTS: dict[str, tuple[ServedFormat, Change, dict[str, Any], str]] = {
    "missing tensor": ("vllm", drop("fc.weight"), {}, "missing_tensor"),
    "unknown name": ("vllm", put("verifier_norm.weight", torch.ones(576)), {}, "unknown_tensor"),
    "d2t absent": ("vllm", drop("d2t", "t2d"), {}, "map_missing"),
    "d2t absolute": ("vllm", absolute, {}, "wrong_map"),
    "head missing": ("vllm", drop("lm_head.weight"), {}, "head_missing"),
    "flag absent, HF style": ("vllm", drop(), {"norm_before_fc": ...}, "input_norm_dropped"),
    "flag absent, speculators": ("speculators", drop(), {"norm_before_residual": ...}, "flag_default"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_does_what_its_rule_says(
    formats: dict[ServedFormat, Path], verifier: Path, right: Right, served: Serve, tmp_path: Path, name: str
) -> None:
    target, change, config, rule = FAULTS[name]
    path = spoil(formats[target], tmp_path / "spoiled", change, config)
    said = judged(path, verifier, "v1")
    assert rule in {reason.rule for reason in said.reasons}
    done = served(path)
    seen = observed(done, right[1].acceptance_length)
    print(f"{name}: {seen}, acceptance length {done.acceptance_length}")
    assert seen == said.outcome, done.log


def observed(done: Served, right: float) -> str:
    """What a server did, in the words of the rules."""
    if not done.started:
        return "refuses"
    if done.acceptance_length is None or abs(done.acceptance_length - right) > CLOSE:
        return "loads_wrongly"
    return "loads"


def nested(*ids: int) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}}


IDS: dict[str, dict[str, Any]] = {
    "one up": {"eagle_aux_hidden_state_layer_ids": [3, 16, 28]},
    "nested only, SGLang's": nested(1, 14, 26) | {"eagle_aux_hidden_state_layer_ids": ...},
    "nested only": nested(5, 10, 20) | {"eagle_aux_hidden_state_layer_ids": ...},
    "none at all": {"eagle_aux_hidden_state_layer_ids": ..., "eagle_config": ...},
}


@pytest.mark.parametrize("name", IDS)
def test_vllm_feeds_the_states_that_the_rules_say(
    formats: dict[ServedFormat, Path], verifier: Path, decoding: Decoding, served: Serve, tmp_path: Path, name: str
) -> None:
    path = spoil(formats["vllm"], tmp_path / "spoiled", drop(), IDS[name])
    found = inspect(Report(path), path, verifier, True)
    assert found is not None and found.source is not None and found.weights is not None
    fed = facts_of(found.source, found.weights, found.verifier, True, False).vllm_states(second_runner=False)
    done = served(path)
    assert done.answered, done.log
    _, rounds = decoding.run(formats["vllm"], fed)
    print(f"{name}: {done.acceptance_length} by vLLM, {rounds.acceptance_length} by decoding on states {fed}")
    assert done.acceptance_length == pytest.approx(rounds.acceptance_length, abs=CLOSE)
