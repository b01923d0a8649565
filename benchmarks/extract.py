"""Extraction on SmolLM2-135M, beside a bare forward pass of the same batches and the naive way; the last line is JSON.

    ours     the stage itself, from its first batch to its last, one row's second computation included
    bare     the decoder over the same batches, nothing kept, no head
    naive    the same with output_hidden_states=True and a file per sample, no head either

Each in a process of its own, in turn. Memory is the largest resident set after the model was loaded. What float8_e4m3 does
to loss and acceptance length is in fp8.py.
"""

import argparse
import importlib
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from safetensors.torch import save_file

from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.params import ExtractParams
from eagle3_core.contract.prepared_files import PreparedManifest
from eagle3_core.contract.store_files import read_index
from eagle3_core.contract.verifier_files import tokenizer_fingerprint
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.prepared import load_prepared, save_manifest, save_rows
from worker.context import StageContext
from worker.extraction import length_batches
from worker.hugging_face import backbone, load_model
from worker.stages import extract
from worker.stages.extract import check_logits

ROOT = Path(__file__).parents[1]
PLACE = ROOT / ".bench" / "extract"
VARIANTS = ("bare", "ours", "naive")
LAYERS = (2, 15, 27, 30)
BATCH_TOKENS, LONGEST = 4096, 768
CPU = torch.device("cpu")


def demo(name: str) -> Any:
    """A module of examples/demo."""
    if str(ROOT / "examples" / "demo") not in sys.path:
        sys.path.append(str(ROOT / "examples" / "demo"))
    return importlib.import_module(name)


def make_rows(verifier: Path, prepared: Path, tokens: int) -> None:
    """Rows of 32 to LONGEST tokens, most of them short; what the tokens are decides nothing here."""
    generator = torch.Generator().manual_seed(0)
    rows, left = [], tokens
    while left > 0:
        length = int((32 * torch.exp(torch.rand(1, generator=generator) * 3.2)).clamp(max=LONGEST))
        ids = torch.randint(20, 49_000, (length,), generator=generator)
        rows.append(TokenRow(ids, torch.arange(length) >= length // 3, f"{len(rows):016}"))
        left -= length
    save_rows(prepared, rows)
    manifest = PreparedManifest(
        verifier=str(verifier),
        tokenizer_fingerprint=tokenizer_fingerprint(verifier),
        conversations="none",
        max_seq_len=LONGEST,
        draft_vocab_size=1,
        tokens=sum(len(row.token_ids_T) for row in rows),
        supervised_tokens=sum(int(row.loss_mask_T.sum()) for row in rows),
        vocab_coverage=1.0,
        dropped={},
        lines=list(range(1, len(rows) + 1)),
        prompts=[row.prompt for row in rows],
    )
    save_manifest(prepared, manifest)


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def forget_peak() -> int:
    """Begin a new peak of the resident set; returns its present size in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return kilobytes("VmRSS") * 1024


def ours(verifier: Path, prepared: Path, out: Path) -> dict[str, float]:
    loaded = {}

    def check_and_look(*given: Any) -> None:
        check_logits(*given)  # the first forward pass, which brings the weights into memory
        loaded["rss"] = forget_peak()

    extract.check_logits = check_and_look
    params = ExtractParams(
        verifier=str(verifier),
        prepared_dir=str(prepared),
        aux_layer_ids=LAYERS[:-1],
        batch_tokens=BATCH_TOKENS,
        device="cpu",
    )
    events = EventWriter(out / "events.jsonl")
    (out / "store").mkdir()
    with stage_output_aside():
        result = extract.run(StageContext("bench", params, out / "store", events, out / "control"))
    peak = kilobytes("VmHWM") * 1024
    events.close()
    told = [json.loads(line) for line in (out / "events.jsonl").read_bytes().splitlines()]
    times = {event["phase"]: event["boottime_s"] for event in told if event["type"] == "phase"}
    return {
        "seconds": times["verifying"] - times["extracting"],
        "loaded": loaded["rss"],
        "peak": peak,
        "bytes_per_token": result.data["bytes"] / result.data["tokens"],
    }


@contextmanager
def stage_output_aside() -> Iterator[None]:
    """What a stage prints goes to standard error."""
    kept, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout = kept


def others(variant: str, verifier: Path, prepared: Path, out: Path) -> dict[str, float]:
    _, rows = load_prepared(prepared)
    batches = list(length_batches([len(row.token_ids_T) for row in rows], BATCH_TOKENS))
    model = backbone(load_model(verifier, CPU, torch.bfloat16))
    run = bare if variant == "bare" else naive
    with torch.inference_mode():
        model(input_ids=rows[batches[0][0]].token_ids_T[None], use_cache=False)
        loaded = forget_peak()
        began = time.perf_counter()
        for batch in batches:
            run(model, [rows[row] for row in batch], batch, out)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "loaded": loaded, "peak": kilobytes("VmHWM") * 1024}


def padded(rows: list[TokenRow]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([row.token_ids_T for row in rows], batch_first=True)


def bare(model: torch.nn.Module, rows: list[TokenRow], numbers: list[int], out: Path) -> None:
    model(input_ids=padded(rows), use_cache=False)


def naive(model: torch.nn.Module, rows: list[TokenRow], numbers: list[int], out: Path) -> None:
    hidden = model(input_ids=padded(rows), use_cache=False, output_hidden_states=True).hidden_states
    states = torch.stack([hidden[layer] for layer in LAYERS], dim=2)
    for slot, (row, number) in enumerate(zip(rows, numbers, strict=True)):
        kept = states[slot, : len(row.token_ids_T)].clone()
        save_file({"hidden_states": kept, "token_ids": row.token_ids_T}, out / f"hs_{number}.safetensors")


def measure(variant: str, verifier: Path) -> dict[str, float]:
    out = PLACE / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    command = [sys.executable, "-P", "-m", "benchmarks.extract", "--variant", variant, "--verifier", str(verifier)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24_000)
    parser.add_argument("--verifier", type=Path, default=ROOT / ".demo" / "verifier")
    parser.add_argument("--variant", choices=VARIANTS)
    chosen = parser.parse_args()
    prepared = PLACE / "prepared"
    if chosen.variant:
        run = ours if chosen.variant == "ours" else lambda *given: others(chosen.variant, *given)
        print(json.dumps(run(chosen.verifier, prepared, PLACE / "out")))
        return
    demo("verifier").fetch_verifier(chosen.verifier)
    prepared.mkdir(parents=True, exist_ok=True)
    make_rows(chosen.verifier, prepared, chosen.tokens)
    tokens = load_prepared(prepared)[0].tokens
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(chosen.rounds):
        for variant, runs in found.items():
            runs.append(measure(variant, chosen.verifier))
            print(variant, runs[-1], file=sys.stderr)
    middle = {
        variant: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for variant, runs in found.items()
    }
    print(json.dumps(summary(middle, tokens)))


if __name__ == "__main__":
    main()
