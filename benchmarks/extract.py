"""Extraction on SmolLM2-135M, beside a bare forward pass of the same batches and the naive way; the last line is JSON.

    ours            the stage itself, from its first batch to its last, one row's second computation included
    bare            the decoder over the same batches, without a head, nothing kept
    naive           the model as it is called, with output_hidden_states=True, and a file per sample
    naive_headless  the same of the decoder alone, which makes no logits

Each in a process of its own, in turn. Memory is the largest resident set once the model is loaded and its weights are
touched. What float8_e4m3 does to loss and acceptance length: fp8.py.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from safetensors.torch import save_file

from benchmarks.fp8 import effect
from benchmarks.stages import run_stage
from eagle3_core.contract.prepared_files import PreparedManifest
from eagle3_core.contract.verifier_files import VerifierFiles, tokenizer_fingerprint
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.prepared import RowWriter, load_prepared, save_manifest
from eagle3_core.data.tokens import MaskedRow
from worker.extraction import length_batches
from worker.hugging_face import backbone, load_model
from worker.stages import extract
from worker.stages.extract import check_logits

ROOT = Path(__file__).parents[1]
PLACE = ROOT / ".bench" / "extract"
VARIANTS = ("bare", "ours", "naive", "naive_headless")
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
    rows: list[MaskedRow] = []
    while sum(len(row.token_ids) for row in rows) < tokens:
        length = int((32 * torch.exp(torch.rand(1, generator=generator) * 3.2)).clamp(max=LONGEST))
        ids = torch.randint(20, 49_000, (length,), generator=generator).tolist()
        rows.append(MaskedRow(ids, bytes(length // 3) + b"\1" * (length - length // 3)))
    with RowWriter(prepared) as writer:
        for row in rows:
            writer.add(array("i", row.token_ids), row.loss_mask)
        writer.finish()
    manifest = PreparedManifest(
        verifier=str(verifier),
        tokenizer_fingerprint=tokenizer_fingerprint(verifier),
        conversations="none",
        max_seq_len=LONGEST,
        draft_vocab_size=1,
        tokens=sum(len(row.token_ids) for row in rows),
        supervised_tokens=sum(sum(row.loss_mask) for row in rows),
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

    def check_and_look(files: VerifierFiles, model: torch.nn.Module, token_ids: torch.Tensor) -> None:
        check_logits(files, model, token_ids)  # the first forward pass, which brings the weights into memory
        loaded["rss"] = forget_peak()

    extract.check_logits = check_and_look
    result, events = run_stage(
        "extract",
        out / "job",
        verifier=verifier,
        prepared_dir=prepared,
        aux_layer_ids=LAYERS[:-1],
        batch_tokens=BATCH_TOKENS,
        device="cpu",
    )
    peak = kilobytes("VmHWM") * 1024
    times = {event["phase"]: event["boottime_s"] for event in events if event["type"] == "phase"}
    return {
        "seconds": times["verifying"] - times["extracting"],
        "loaded": loaded["rss"],
        "peak": peak,
        "bytes_per_token": result.data["bytes"] / result.data["tokens"],
    }


def others(variant: str, verifier: Path, prepared: Path, out: Path) -> dict[str, float]:
    _, rows = load_prepared(prepared)
    batches = list(length_batches([len(row.token_ids_T) for row in rows], BATCH_TOKENS))
    model = load_model(verifier, CPU, torch.bfloat16)
    model = model if variant == "naive" else backbone(model)
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
    command = [sys.executable, "-m", "benchmarks.extract", "--variant", variant, "--verifier", str(verifier)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(out)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def speeds(verifier: Path, rounds: int, tokens: int) -> dict[str, Any]:
    prepared = PLACE / "prepared"
    prepared.mkdir(parents=True, exist_ok=True)
    make_rows(verifier, prepared, tokens)
    tokens = load_prepared(prepared)[0].tokens
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, runs in found.items():
            runs.append(measure(variant, verifier))
            print(variant, runs[-1], file=sys.stderr)
    middle = {
        variant: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for variant, runs in found.items()
    }
    return {
        "tokens_per_s": round(tokens / middle["ours"]["seconds"], 1),
        "ratio_to_bare_forward": ratio(found, "bare", speed),
        "memory_ratio_to_bare_forward": ratio(found, "bare", lambda run: run["peak"]),
        "ratio_to_output_hidden_states": ratio(found, "naive", speed),
        "memory_ratio_to_output_hidden_states": ratio(found, "naive", over_loaded),
        "bytes_per_token": round(middle["ours"]["bytes_per_token"], 1),
        "ratio_to_output_hidden_states_headless": ratio(found, "naive_headless", speed),
        "memory_ratio_to_output_hidden_states_headless": ratio(found, "naive_headless", over_loaded),
        "peak_rss_mb": {name: round(run["peak"] / 1e6, 1) for name, run in middle.items()},
        "over_loaded_mb": {name: round(over_loaded(run) / 1e6, 1) for name, run in middle.items()},
        "tokens": tokens,
        "seconds": {variant: [round(run["seconds"], 2) for run in runs] for variant, runs in found.items()},
    }


def speed(run: dict[str, float]) -> float:
    return 1 / run["seconds"]


def over_loaded(run: dict[str, float]) -> float:
    return run["peak"] - run["loaded"]


def ratio(found: dict[str, list[dict[str, float]]], other: str, of: Callable[[dict[str, float]], float]) -> float:
    """Ours over another's, each pair of the same round; the median."""
    pairs = zip(found["ours"], found[other], strict=True)
    return round(statistics.median(of(ours) / of(theirs) for ours, theirs in pairs), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=6_000, help="of the rows whose extraction is timed")
    parser.add_argument("--prompts", type=int, default=60, help="whose answers the drafters are trained on")
    parser.add_argument("--epochs", type=int, default=3, help="of each drafter")
    parser.add_argument("--verifier", type=Path, default=ROOT / ".demo" / "verifier")
    parser.add_argument("--variant", choices=VARIANTS, help="one of them alone, for a run that this one starts")
    chosen = parser.parse_args()
    if chosen.variant:
        run = ours if chosen.variant == "ours" else partial(others, chosen.variant)
        print(json.dumps(run(chosen.verifier, PLACE / "prepared", PLACE / "out")))
        return
    demo("verifier").fetch_verifier(chosen.verifier)
    found = speeds(chosen.verifier, chosen.rounds, chosen.tokens)
    prompts = (ROOT / "examples" / "demo" / "prompts_train.txt").read_text().splitlines()[: chosen.prompts]
    shutil.rmtree(PLACE / "fp8", ignore_errors=True)
    found["fp8"] = effect(chosen.verifier, prompts, chosen.epochs, PLACE / "fp8", demo("sample").sample_responses)
    shutil.rmtree(PLACE / "fp8")
    with contextlib.suppress(OSError):
        found["load_average"] = os.getloadavg()
    modules = (torch, transformers, safetensors)
    found["versions"] = {"python": platform.python_version(), **{each.__name__: each.__version__ for each in modules}}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
