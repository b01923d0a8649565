"""Our drafter against speculators 0.9.0, its own code in a venv of its own: same weights, same data, same numbers."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.checkpoint.format import read_drafter_config, read_drafter_tensors, write_checkpoint
from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.vocab_map import build_vocab_map
from eagle3_core.training.engine import Document, make_pack, score_pack
from eagle3_core.training.score import TargetHead
from eagle3_core.training.setup import make_target_head
from eagle3_core.verifier.tensors import load_verifier_weights
from tests import tiny

pytestmark = pytest.mark.interop

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
}
CASES = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all_of_0_9": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "llama3_rope": {"rope": LLAMA3},
    "qwen3": {"qk_norm": True},
    "sliding_window": {"sliding_window": 7},
    "yarn_rope": {"rope": YARN},
    "two_layers": {"num_hidden_layers": 2},
}
TTT_STEPS, DECAY, TOKENS = 3, 0.8, 48
TRAINED, BATCHES, STEPS, LR = "all_of_0_9", 4, 50, 1e-3


@pytest.fixture(scope="session")
def answers(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, object]]]:
    """Case name -> (its directory, what the peer said when loading)."""
    root = tmp_path_factory.mktemp("interop")
    verifier = tiny.make_verifier(root / "verifier")
    orders = []
    for number, (name, changes) in enumerate(CASES.items()):
        directory = root / name
        checkpoint = make_checkpoint(directory, verifier, number, changes)
        save_file(make_inputs(number), directory / "inputs.safetensors")
        order: dict[str, object] = {
            "checkpoint": str(checkpoint),
            "inputs": str(directory / "inputs.safetensors"),
            "output": str(directory / "peer.safetensors"),
            "ttt_steps": TTT_STEPS,
            "decay": DECAY,
        }
        if name == TRAINED:
            files = [directory / f"batch_{index}.safetensors" for index in range(BATCHES)]
            for index, file in enumerate(files):
                save_file(make_inputs(100 + index), file)
            order["train"] = {"batches": [str(file) for file in files], "steps": STEPS, "lr": LR}
        orders.append(order)
    (root / "cases.json").write_text(json.dumps(orders))
    driver = Path(__file__).with_name("speculators_driver.py")
    run = subprocess.run([python, driver, root / "cases.json"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    said = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {name: (root / name, answer) for name, answer in zip(CASES, said, strict=True)}


def make_checkpoint(directory: Path, verifier: Path, seed: int, changes: dict[str, object]) -> Path:
    """A checkpoint of random weights, written by our own writer."""
    directory.mkdir()
    config = DrafterConfig(
        **{
            "hidden_size": tiny.HIDDEN,
            "intermediate_size": tiny.INTERMEDIATE,
            "num_attention_heads": tiny.HEADS,
            "num_key_value_heads": tiny.KV_HEADS,
            "head_dim": tiny.HEAD_DIM,
            "vocab_size": tiny.VOCAB,
            "draft_vocab_size": 100,
            "aux_layer_ids": tiny.AUX_LAYER_IDS,
            "rope": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 512,
            **changes,
        }
    )
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    drafter.embed_tokens.weight.data = load_verifier_weights(read_verifier_files(verifier)).embedding
    vocab_map = build_vocab_map(torch.randint(0, 50, (tiny.VOCAB,)), 100, [258])
    drafter.d2t.copy_(vocab_map.d2t_D)
    drafter.t2d.copy_(vocab_map.t2d_V)
    optimizer = torch.optim.AdamW(drafter.parameters())
    return write_checkpoint(
        directory,
        "0",
        epoch=0,
        config=config,
        tensors=drafter.state_dict(),
        optimizer_state=optimizer.state_dict(),
        scheduler_state={"last_epoch": 0},
        verifier_name=str(verifier),
        verifier_architectures=["LlamaForCausalLM"],
        speculative_tokens=3,
        step=0,
        extra={},
    )


def make_inputs(seed: int) -> dict[str, torch.Tensor]:
    """One document: tokens, aux states, last states, all float32."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "token_ids": torch.randint(0, 256, (TOKENS,), generator=generator),
        "aux": torch.randn(TOKENS, 3, tiny.HIDDEN, generator=generator),
        "last": torch.randn(TOKENS, tiny.HIDDEN, generator=generator),
    }


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over the norm of theirs."""
    return float((ours - theirs).norm() / theirs.norm())


def load_ours(directory: Path) -> tuple[Eagle3Drafter, TargetHead]:
    """Our drafter and target head of a case."""
    drafter = Eagle3Drafter(read_drafter_config(directory / "0").config)
    tensors = read_drafter_tensors(directory / "0")
    drafter.load_state_dict({key: t.float() if t.is_floating_point() else t for key, t in tensors.items()})
    files = read_verifier_files(directory.parent / "verifier")
    weights = load_verifier_weights(files, drafter.draft_to_target())
    return drafter, make_target_head(weights, "pre_norm", torch.device("cpu"))


def loss_of(drafter: Eagle3Drafter, head: TargetHead, inputs: Path) -> torch.Tensor:
    """Our loss on a file of inputs."""
    data = load_file(inputs)
    # The peer scores one row more a step than a document has targets for: its token would be the one behind the end.
    rows_KR = torch.stack([torch.arange(TOKENS - 1) < TOKENS - 1 - step for step in range(TTT_STEPS)])
    document = Document(data["token_ids"], data["aux"], data["last"], rows_KR)
    pack = make_pack([document], drafter.config, torch.device("cpu"))
    return score_pack(drafter, head, pack, [DECAY**k / count for k, count in enumerate(pack.plan.counts)])[0]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient_equal_the_peers(answers: dict[str, tuple[Path, dict[str, object]]], name: str) -> None:
    directory, _ = answers[name]
    drafter, head = load_ours(directory)
    loss = loss_of(drafter, head, directory / "inputs.safetensors")
    loss.backward()

    theirs = load_file(directory / "peer.safetensors")
    assert relative_error(loss.detach().reshape(1), theirs["loss"]) < 1e-5
    trained = {key: p for key, p in drafter.named_parameters() if p.requires_grad}
    assert {f"grad.{key}" for key in trained} == set(theirs) - {"loss", "losses"}
    errors = {key: relative_error(p.grad, theirs[f"grad.{key}"]) for key, p in trained.items()}
    assert max(errors.values()) < 1e-5, errors


def test_fifty_steps_of_training_give_the_peers_losses(answers: dict[str, tuple[Path, dict[str, object]]]) -> None:
    directory, _ = answers[TRAINED]
    drafter, head = load_ours(directory)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=LR)
    losses = []
    for step in range(STEPS):
        loss = loss_of(drafter, head, directory / f"batch_{step % BATCHES}.safetensors")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    ours, theirs = torch.stack(losses), load_file(directory / "peer.safetensors")["losses"]
    assert ours[-1] < ours[0] * 0.8, "something was learned"
    assert float((ours / theirs - 1).abs().max()) < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_the_peer_loads_our_checkpoint_without_complaint(
    answers: dict[str, tuple[Path, dict[str, object]]], name: str
) -> None:
    _, said = answers[name]
    assert said == {
        "class": "Eagle3DraftModel",
        "complaints": [],
        "aux_layer_ids": list(tiny.AUX_LAYER_IDS),
    }
