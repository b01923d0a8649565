"""What the rules say of vLLM is what it does, on both of its model runners, with right drafters and with faults."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.judging import put
from tests.serving.cases import CASES, FAULTS, HIDDEN, WINDOW, Case, Config, keys, rope
from tests.serving.engine import NEW_TOKENS, PROMPTS, Chains, Drafted, Engine, agreement, own_drafts
from tests.serving.tiny import judged, laid_out, write_tiny, write_verifier

pytestmark = pytest.mark.serving

SAME = 0.98
"""Share of draft tokens that two programs which compute the same in float32 agree on, at the least."""

Made = Callable[[Config], tuple[Path, Chains]]
Running = tuple[str, Engine]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


@pytest.fixture(scope="module", params=["v1", "v2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Engine(request.param, tmp_path_factory.mktemp("engine") / request.param) as engine:
        yield request.param, engine


@pytest.fixture(scope="module")
def made(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A drafter of a make as training wrote it, and what it drafts."""
    known: dict[str, tuple[Path, Chains]] = {}

    def make(changes: Config) -> tuple[Path, Chains]:
        name = json.dumps(changes, sort_keys=True)
        if name not in known:
            path = write_tiny(tmp_path_factory.mktemp("made") / "run", verifier, **changes)
            known[name] = path, own_drafts(verifier, path)
        return known[name]

    return make


def observed(done: Drafted, right: Chains, tokens: int) -> str:
    """What vLLM did, in the words of the rules."""
    if done.refused is not None:
        return "refuses"
    if done.failed is not None or agreement(right, done.drafts, tokens) < SAME:
        return "loads_wrongly"
    return "loads"


@pytest.mark.parametrize("name", CASES)
def test_vllm_does_what_the_rules_say(name: str, verifier: Path, engine: Running, made: Made, tmp_path: Path) -> None:
    case, (runner, vllm) = CASES[name], engine
    if runner not in case.runners:
        pytest.skip("another runner's case")
    source, right = made(case.make)
    path = laid_out(case, source, tmp_path / "drafter", verifier)
    said = judged(path, verifier, runner)
    done = vllm.run(verifier, path)
    seen = observed(done, right, case.tokens)
    share = f", {agreement(right, done.drafts, case.tokens):.0%} of the draft tokens" if done.drafts else ""
    error = done.refused or done.failed or ""
    start = max(0, error.find(case.words) - 60)
    print(f"{runner}, {name}: {seen}{share} {error[start : start + 140]!r}")
    assert (seen, said.outcome) == (case.does, case.said or case.does), (said, done)
    assert case.words in error
    assert case.rule is None or case.rule in {reason.rule for reason in said.reasons}


def test_a_window_moves_on_along_the_chain(verifier: Path, engine: Running, made: Made, tmp_path: Path) -> None:
    source, right = made(WINDOW)
    path = laid_out(FAULTS["a window"], source, tmp_path / "drafter", verifier)
    drafts = engine[1].run(verifier, path).drafts
    assert agreement(right, drafts, 1) >= SAME > agreement(right, drafts)


def test_a_bias_of_fc_is_dropped(verifier: Path, engine: Running, made: Made, tmp_path: Path) -> None:
    with_bias = put("fc.bias", torch.ones(HIDDEN).bfloat16())
    case = Case("fc_bias", "loads_wrongly", change=with_bias, edit=keys(fc_bias=True))
    source, without = made(case.make)
    path = laid_out(case, source, tmp_path / "drafter", verifier)
    runner, vllm = engine
    said = judged(path, verifier, runner)
    assert said.outcome == case.does and case.rule in {reason.rule for reason in said.reasons}
    assert agreement(without, vllm.run(verifier, path).drafts) >= SAME, "it drafts as without the bias"


@pytest.mark.parametrize("turned", [{}, rope("yarn", factor=4.0, original_max_position_embeddings=4)])
def test_beyond_its_positions_v1_drafts_nothing_and_v2_at_random_with_yarn(
    turned: Config, verifier: Path, engine: Running, made: Made, tmp_path: Path
) -> None:
    short = Case("positions", "loads", make={"max_position_embeddings": 16} | turned)
    source, right = made(short.make)
    path = laid_out(short, source, tmp_path / "drafter", verifier)
    runner, vllm = engine
    assert "positions" in {reason.rule for reason in judged(path, verifier, runner).reasons}
    done = vllm.run(verifier, path)
    assert len(PROMPTS[0]) > 16 and len(done.texts[0]) == NEW_TOKENS
    if runner == "v1":
        assert done.drafts[0] == []
    else:
        assert (agreement(right[:1], done.drafts[:1]) < SAME) == bool(turned)


@pytest.mark.parametrize("name", ["no proposal method", "no verifier"])
def test_served_by_itself_a_drafter_must_name_verifier_and_tokens(
    name: str, verifier: Path, engine: Running, made: Made, tmp_path: Path
) -> None:
    case = CASES[name]
    path = laid_out(case, made(case.make)[0], tmp_path / "drafter", verifier)
    done = engine[1].run(path, path, speculative_config=None)
    assert "Invalid speculators config structure" in (done.refused or ""), done
