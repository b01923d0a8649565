"""Runs inside vLLM's own venv: its engine drafts with one drafter after the other, each in a process of its own.

usage: python engine_driver.py v1|v2 < requests

A request is a line of JSON: what `draft` takes, and a log file. So is the answer: `refused`,
why the engine did not start; or `failed`, why it ended at a request; or `texts`, new token ids of each prompt, and
`drafts`, the chains drafted in its rounds. vLLM is imported once and forked for each request, so that a tiny model is
served within seconds.

vLLM's V2 model runner asks for a Triton with a CPU backend, which PyPI does not have. Triton's own interpreter takes
its place: it runs the same kernels, one program after the other.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

(runner,) = sys.argv[1:]
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
if runner == "v2":
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

# What an engine imports when it starts is imported here, once for all children.
import compressed_tensors  # noqa: E402, F401
import vllm.model_executor.models.deepseek_eagle3  # noqa: E402
import vllm.model_executor.models.llama_eagle3  # noqa: E402
import vllm.model_executor.models.qwen3_eagle3  # noqa: E402
import vllm.v1.worker.cpu_model_runner  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402
import vllm.v1.worker.gpu.model_runner  # noqa: E402, F401
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator  # noqa: E402

drafts: list[list[int]] = []


def record(kind: Any) -> None:
    """Note every chain that a proposer of this class drafts for a request."""
    original = kind.propose

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            drafts.extend(out.tolist())
        return out

    kind.propose = propose


def draft(arguments: dict[str, Any], prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Start an engine and have every prompt continued greedily; whatever it raises is the answer."""
    try:
        engine = LLM(**arguments)
    except BaseException as error:  # noqa: BLE001
        return {"refused": f"{type(error).__name__}: {error}"}
    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    texts, chains = [], []
    for prompt in prompts:
        drafts.clear()
        try:
            done = engine.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
        except BaseException as error:  # noqa: BLE001
            return {"failed": f"{type(error).__name__}: {error}"}
        texts.append(list(done[0].outputs[0].token_ids))
        chains.append(list(drafts))
    return {"texts": texts, "drafts": chains}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a child makes of a request."""
    with tempfile.TemporaryDirectory() as work:
        result = Path(work) / "result.json"
        child = os.fork()
        if child == 0:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            result.write_text(json.dumps(draft(**request["draft"])))
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if result.exists():
            return dict(json.loads(result.read_text()))
        return {"failed": f"ended with status {status}"}


for each in (SpecDecodeBaseProposer, EagleSpeculator):
    record(each)
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
gc.collect()
gc.freeze()  # a start collects seven times, which takes seconds over everything imported here
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), file=replies, flush=True)
