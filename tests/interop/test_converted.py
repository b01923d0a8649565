"""What was converted, loaded by peers' own code: speculators with our loss and no complaint, SpecForge whole."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers import SPECFORGE, peer_python
from eagle3_core.checkpoint.convert import convert
from eagle3_core.checkpoint.drafter import load_drafter
from eagle3_core.contract.params import ServedFormat
from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.training.setup import make_target_head
from eagle3_core.verifier.tensors import load_verifier_weights
from tests import tiny
from tests.cases import peer_checkpoint
from tests.interop.test_speculators import DECAY, TOKENS, TTT_STEPS, loss_of, make_checkpoint, relative_error

pytestmark = pytest.mark.interop

WAYS: dict[str, tuple[ServedFormat, dict[str, object]]] = {
    "vllm": ("vllm", {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}),
    "sglang": ("sglang", {"fc_norm": True}),
    "sglang_two_layers": ("sglang", {"num_hidden_layers": 2}),
    "both": ("both", {"norm_output": True}),
    "eagle": ("eagle", {}),
    "qwen3": ("vllm", {"qk_norm": True, "attention_bias": False}),
}
PEERS = ("specforge-sglang", "specforge-hf", "modelopt", "eagle-official", "speculators-0.3.0/0", "speculators-0.9.0/0")


def peers_verifier(directory: Path, layers: int) -> Path:
    """A verifier of the size of the real checkpoints, with the embedding they were made with."""
    embedding = load_file(peer_checkpoint("specforge-hf") / "model.safetensors")["embed_tokens.weight"]
    directory.mkdir(parents=True)
    config = tiny.verifier_config(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=8192,
        max_position_embeddings=2048,
        dtype="bfloat16",
    )
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": torch.randn(8192, 256, generator=torch.Generator().manual_seed(2)).bfloat16(),
        "model.norm.weight": torch.ones(256).bfloat16(),
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def check(python: Path, converted: Path, verifier: Path, work: Path, known: tuple[str, ...] = ()) -> None:
    """speculators loads it without a word, but of what is `known`, and computes the loss that we do."""
    files = read_verifier_files(verifier)
    generator = torch.Generator().manual_seed(3)
    inputs = {
        "token_ids": torch.randint(0, 256, (TOKENS,), generator=generator),
        "aux": torch.randn(TOKENS, 3, files.hidden_size, generator=generator),
        "last": torch.randn(TOKENS, files.hidden_size, generator=generator),
    }
    save_file(inputs, work / "inputs.safetensors")
    order = {
        "checkpoint": str(converted),
        "inputs": str(work / "inputs.safetensors"),
        "output": str(work / "peer.safetensors"),
        "ttt_steps": TTT_STEPS,
        "decay": DECAY,
    }
    (work / "cases.json").write_text(json.dumps([order]))
    driver = Path(__file__).with_name("speculators_driver.py")
    run = subprocess.run([python, driver, work / "cases.json"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    said = next(json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    assert [complaint for complaint in said["complaints"] if not complaint.startswith(known)] == []
    drafter = load_drafter(converted, files, torch.device("cpu")).float()
    head = make_target_head(load_verifier_weights(files, drafter.draft_to_target()), "pre_norm", torch.device("cpu"))
    ours, theirs = loss_of(drafter, head, work / "inputs.safetensors"), load_file(work / "peer.safetensors")["loss"]
    assert relative_error(ours.detach().reshape(1), theirs) < 1e-5


@pytest.mark.parametrize("name", WAYS)
def test_ours_by_way_of_another_format(python: Path, tmp_path: Path, name: str) -> None:
    target, changes = WAYS[name]
    verifier = tiny.make_verifier(tmp_path / "verifier")
    source = make_checkpoint(tmp_path / "ours", verifier, 1, changes)
    away = convert(source, tmp_path / "away", target, verifier=verifier).path
    back = convert(away, tmp_path / "back", "speculators", verifier=verifier).path
    check(python, back, verifier, tmp_path)


@pytest.mark.parametrize("name", PEERS)
def test_real_checkpoints_of_peers(python: Path, tmp_path: Path, name: str) -> None:
    verifier = peers_verifier(tmp_path / "verifier", 8 if name == "modelopt" else 16)
    named = str(verifier)  # speculators' own name a verifier that is nowhere to be found
    done = convert(peer_checkpoint(name), tmp_path / "out", "speculators", verifier=verifier, verifier_name=named)
    # Its config states a factor of 32 from 2048 positions on, and 4096 positions.
    known = ("The explicitly set RoPE scaling factor",) if name == "modelopt" else ()
    check(python, done.path, verifier, tmp_path, known)


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True}, {"norm_output": True}])
def test_specforge_misses_nothing_in_its_own_format(tmp_path: Path, changes: dict[str, object]) -> None:
    verifier = tiny.make_verifier(tmp_path / "verifier")
    source = make_checkpoint(tmp_path / "ours", verifier, 1, changes)
    converted = convert(source, tmp_path / "out", "sglang", verifier=verifier).path
    driver = Path(__file__).with_name("specforge_loads_driver.py")
    run = subprocess.run([peer_python(SPECFORGE), driver, converted], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {"missing": [], "unexpected": []}
