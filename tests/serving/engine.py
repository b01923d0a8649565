"""vLLM's engine without its HTTP front, on both model runners: what it drafts with tiny models, chain by chain.

A tiny drafter with random weights is accepted nowhere, so that acceptance says nothing about it. Its draft tokens do:
each hangs on every weight, flag and id, and two programs that compute the same agree on nearly all of them.
"""

import json
import subprocess
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import VLLM, peer_python
from eagle3_core.checkpoint.drafter import load_drafter
from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.evaluation.speculate import VerifierSession, decode_speculative
from worker.hugging_face import HuggingFaceSession, capture_states, load_model

SPECULATIVE_TOKENS, NEW_TOKENS = 3, 12
PROMPTS = [[*range(100, 124)], [7, 9, 300, 4], [17, 450, 33, 250, 81, 99, 140, 2, 310, 5, 6, 8]]

Chains = list[list[list[int]]]


class _Recorded:
    """A session that notes the chains it is given to verify."""

    def __init__(self, inner: VerifierSession) -> None:
        self._inner, self.chains = inner, list[list[int]]()
        self._started = False

    def extend(self, ids: list[int]) -> tuple[list[int], Tensor]:
        if self._started:
            self.chains.append(ids[1:])
        self._started = True
        return self._inner.extend(ids)

    def rewind(self, count: int) -> None:
        self._inner.rewind(count)


def own_drafts(verifier: Path, drafter: Path) -> Chains:
    """The chains that real decoding with transformers drafts of each prompt."""
    model = load_model(verifier, torch.device("cpu"), torch.float32, False)
    loaded = load_drafter(drafter, read_verifier_files(verifier), torch.device("cpu"))
    fed = loaded.config.aux_layer_ids
    assert fed is not None
    chains = []
    with capture_states(model, fed) as captured:
        for prompt in PROMPTS:
            session = _Recorded(HuggingFaceSession(model, fed, captured))
            decode_speculative(session, loaded, prompt, NEW_TOKENS, set(), SPECULATIVE_TOKENS)
            chains.append(session.chains)
    return chains


def agreement(ours: Chains, theirs: Chains, tokens: int = SPECULATIVE_TOKENS) -> float:
    """Share of our draft tokens, the first `tokens` of each chain, that are theirs as well.

    They may draft once more behind the last token; where they draft no more, they do not agree.
    """
    same = [
        one == other
        for mine, his in zip(ours, theirs, strict=True)
        for chain, drafted in zip_longest(mine, his[: len(mine)], fillvalue=[None] * SPECULATIVE_TOKENS)
        for one, other in zip(chain[:tokens], drafted[:tokens], strict=True)
    ]
    return sum(same) / len(same)


@dataclass(frozen=True)
class Drafted:
    """What an engine did: why it did not start, or ended at a request; else its texts and the chains it drafted."""

    log: str
    refused: str | None = None
    failed: str | None = None
    texts: list[list[int]] = field(default_factory=list)
    drafts: Chains = field(default_factory=list)


class Engine:
    """vLLM with one of its two model runners."""

    def __init__(self, runner: str, work: Path) -> None:
        self._work, self._asked = work, 0
        work.mkdir(parents=True)
        self._errors = (work / "driver.log").open("wb")
        self._process = subprocess.Popen(
            [str(peer_python(VLLM)), "-P", str(Path(__file__).with_name("engine_driver.py")), runner],
            cwd=work,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate(timeout=60)
        self._errors.close()

    def run(self, verifier: Path, drafter: Path, **changes: Any) -> Drafted:
        """Have every prompt continued; `changes` go into the arguments of the engine, None takes one out."""
        self._asked += 1
        log = self._work / f"{self._asked}.log"
        arguments = {
            "model": str(verifier),
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 1,
            "num_gpu_blocks_override": 16,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "speculative_config": {
                "method": "eagle3",
                "model": str(drafter),
                "num_speculative_tokens": SPECULATIVE_TOKENS,
            },
        } | changes
        asked = {key: value for key, value in arguments.items() if value is not None}
        assert self._process.stdin is not None and self._process.stdout is not None
        draft = {"arguments": asked, "prompts": PROMPTS, "new_tokens": NEW_TOKENS}
        print(json.dumps({"draft": draft, "log": str(log)}), file=self._process.stdin, flush=True)
        reply = self._process.stdout.readline()
        assert reply, (self._work / "driver.log").read_text(errors="replace")[-3000:]
        return Drafted(log.read_text(errors="replace")[-6000:], **json.loads(reply))
