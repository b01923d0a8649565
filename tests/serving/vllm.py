"""A real vLLM on the CPU, in a venv of its own: started, asked, counted, stopped."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.peers import VLLM, peer_python
from tests.conftest import WaitFor

READY_S, ANSWER_S = 400.0, 300.0
SPECULATIVE_TOKENS, NEW_TOKENS = 3, 40

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
_COUNTER = "vllm:spec_decode_num_{}_total"


@dataclass(frozen=True)
class Served:
    """What a server did with a drafter.

    started: it became healthy.
    answered: it answered every prompt.
    acceptance_length: as its counters say; None where it did not answer.
    texts: new token ids of each prompt.
    log: the end of what it printed.
    """

    started: bool
    answered: bool
    rounds: int
    acceptance_length: float | None
    texts: list[list[int]]
    log: str


def serve(verifier: Path, drafter: Path, prompts: list[list[int]], work: Path, wait_for: WaitFor) -> Served:
    """Serve a drafter beside its verifier in float32, and have every prompt continued greedily."""
    work.mkdir()
    with _server(verifier, drafter, work) as (process, port), httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:

        def ready() -> str | None:
            if process.poll() is not None:
                return "ended"
            try:
                return "ready" if http.get("/health", timeout=5).status_code == 200 else None
            except httpx.TransportError:
                return None

        started = wait_for(ready, READY_S, "vLLM's health") == "ready"
        texts = [] if not started else _answers(http, str(verifier), prompts)
        answered = texts is not None and started
        rounds, length = _counted(http) if answered else (0, None)
    log = (work / "vllm.log").read_text(errors="replace")
    return Served(started, answered, rounds, length, texts or [], log[-6000:])


@contextmanager
def _server(verifier: Path, drafter: Path, work: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server on a free loopback port; it and its children are gone afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": SPECULATIVE_TOKENS}
    command = [
        *(str(peer_python(VLLM)), "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(verifier), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "2"),
        *("--enforce-eager", "--host", "127.0.0.1", "--port", str(port)),
        *("--speculative-config", json.dumps(speculative)),
    ]
    with (work / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=work,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | _ENVIRONMENT,
            start_new_session=True,
        )
    try:
        yield process, port
    finally:
        # Its engine is a child in the same group, which a dead parent would leave behind.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)


def _answers(http: httpx.Client, model: str, prompts: list[list[int]]) -> list[list[int]] | None:
    """New tokens of each prompt; None once a request fails."""
    texts = []
    for prompt in prompts:
        body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "return_token_ids": True}
        try:
            answer = http.post("/v1/completions", json=body, timeout=ANSWER_S)
        except httpx.TransportError:
            return None
        if answer.status_code != 200:
            return None
        texts.append(answer.json()["choices"][0]["token_ids"])
    return texts


def _counted(http: httpx.Client) -> tuple[int, float]:
    """Rounds and acceptance length, the bonus token counted."""
    lines = http.get("/metrics", timeout=30).text.splitlines()

    def total(what: str) -> float:
        return sum(float(line.split()[-1]) for line in lines if line.startswith(_COUNTER.format(what)))

    rounds = total("drafts")
    return int(rounds), 1 + total("accepted_tokens") / rounds if rounds else 1.0
