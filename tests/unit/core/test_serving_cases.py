"""What the rules say of each drafter that `make serving` has vLLM serve; that they are right is shown there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3_core.checkpoint.judge import judge
from eagle3_core.checkpoint.server_rules import RULES
from tests.serving.cases import CASES, FAULTS, Config
from tests.serving.tiny import judged, laid_out, write_tiny, write_verifier

Made = Callable[[Config], Path]
BY_THEMSELVES = {"positions", "layer_default", "fc_bias"}
"""Rules provoked by tests of their own."""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


@pytest.fixture(scope="module")
def made(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    known: dict[str, Path] = {}

    def make(changes: Config) -> Path:
        name = json.dumps(changes, sort_keys=True)
        if name not in known:
            known[name] = write_tiny(tmp_path_factory.mktemp("made") / "run", verifier, **changes)
        return known[name]

    return make


@pytest.mark.parametrize("name", CASES)
def test_the_rules_say_what_vllm_does(name: str, verifier: Path, made: Made, tmp_path: Path) -> None:
    case = CASES[name]
    path = laid_out(case, made(case.make), tmp_path / "drafter", verifier)
    for runner in case.runners:
        said = judged(path, verifier, runner)
        told = {reason.rule: reason.proof for reason in said.reasons}
        assert said.outcome == (case.said or case.does), told
        assert case.rule is None or told[case.rule] == "provoked"


def test_without_a_verifier_states_of_speculators_0_3_are_known_to_be_others(
    verifier: Path, made: Made, tmp_path: Path
) -> None:
    case = FAULTS["none, speculators 0.3"]
    path = laid_out(case, made(case.make), tmp_path / "drafter", verifier)
    vllm = [one for one in judge(path).servers if one.server.startswith("vllm")]
    assert all("layer_default" in {reason.rule for reason in one.reasons} for one in vllm)


def test_every_rule_said_to_be_provoked_on_vllm_has_its_case() -> None:
    provoked = {rule.code for rule in RULES if {"vllm-v1", "vllm-v2"} & set(rule.provoked)}
    assert provoked - {case.rule for case in CASES.values()} == BY_THEMSELVES
