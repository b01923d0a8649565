"""The demo's verifier and drafter, prompts for them, and what real decoding with transformers makes of both."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3_core.checkpoint.drafter import load_drafter
from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.evaluation.rounds import RoundCounts
from eagle3_core.evaluation.speculate import decode_speculative
from tests.serving.vllm import NEW_TOKENS, SPECULATIVE_TOKENS
from worker.hugging_face import HuggingFaceSession, HuggingFaceTokenizer, capture_states, load_model
from worker.stages.evaluate import read_prompts

ROOT = Path(__file__).parents[2]
DEMO = ROOT / ".demo"
PROMPTS = 5


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo's directory; it is run first where it was not."""
    if not (DEMO / "run" / "checkpoints").is_dir():
        subprocess.run([sys.executable, ROOT / "examples" / "demo" / "demo.py"], check=True)
    return DEMO


@pytest.fixture(scope="session")
def verifier(demo: Path) -> Path:
    return demo / "verifier"


@pytest.fixture(scope="session")
def trained(demo: Path) -> Path:
    """The drafter that the demo trained."""
    epochs = [path for path in (demo / "run" / "checkpoints").iterdir() if path.name.isdigit()]
    return max(epochs, key=lambda path: int(path.name))


@pytest.fixture(scope="session")
def prompts(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Token ids of held-out prompts."""
    lines = (ROOT / "examples" / "demo" / "prompts_held_out.txt").read_text().splitlines()
    file = tmp_path_factory.mktemp("prompts") / "held_out.jsonl"
    file.write_text("".join(json.dumps({"messages": [{"role": "user", "content": line}]}) + "\n" for line in lines))
    return read_prompts(file, HuggingFaceTokenizer(verifier, False), PROMPTS)


class Decoding:
    """Real speculative decoding with transformers, on whatever states it is told to feed."""

    def __init__(self, verifier: Path, prompts: list[list[int]]) -> None:
        torch.set_num_threads(1)  # a server runs beside it, and two threads that wait for each other are slower
        self._files = read_verifier_files(verifier)
        self._stop = set(self._files.eos_token_ids) | set(HuggingFaceTokenizer(verifier, False).stop_ids)
        self._model = load_model(verifier, torch.device("cpu"), torch.float32, False)
        self._prompts = prompts

    def run(self, drafter_path: Path, states: tuple[int, ...] | None = None) -> tuple[list[list[int]], RoundCounts]:
        """New tokens of each prompt, and the rounds they took; `states`: fed instead of the drafter's own."""
        drafter = load_drafter(drafter_path, self._files, torch.device("cpu"))
        fed = states or drafter.config.aux_layer_ids
        assert fed is not None
        texts, total = [], RoundCounts(SPECULATIVE_TOKENS)
        with capture_states(self._model, fed) as captured:
            for prompt in self._prompts:
                session = HuggingFaceSession(self._model, fed, captured)
                text, rounds = decode_speculative(session, drafter, prompt, NEW_TOKENS, self._stop, SPECULATIVE_TOKENS)
                texts.append(text)
                total.add(rounds)
        return texts, total


@pytest.fixture(scope="session")
def right(decoding: Decoding, trained: Path) -> tuple[list[list[int]], RoundCounts]:
    """The drafter's texts and rounds as it was trained."""
    return decoding.run(trained)


@pytest.fixture(scope="session")
def decoding(verifier: Path, prompts: list[list[int]]) -> Decoding:
    return Decoding(verifier, prompts)
