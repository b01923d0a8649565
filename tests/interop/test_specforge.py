"""Our losses against SpecForge 0.2.0, its own code in a venv of its own, where the definitions meet.

Its loss is the soft cross-entropy over the kept vocabulary, summed over the supervised rows whose first choice is kept,
divided by all rows. With every row supervised and the whole vocabulary kept, that is our soft_ce but for the divisor.
"""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers import SPECFORGE, peer_python
from eagle3_core.training.engine import Document, make_pack, score_pack
from eagle3_core.training.losses import mixture
from tests.unit.core.test_ttt import small_drafter

pytestmark = pytest.mark.interop

TTT_STEPS, TOKENS = 3, 48


@pytest.mark.parametrize("fc_norm", [False, True])
def test_the_loss_of_each_step_and_every_gradient_equal_the_peers(tmp_path: Path, fc_norm: bool) -> None:
    drafter = small_drafter(fc_norm=fc_norm)
    shape = drafter.config
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    tensors = {name.replace("layers.0.", "midlayer."): p.detach() for name, p in drafter.named_parameters()}
    save_file(tensors, tmp_path / "weights.safetensors")
    data = {
        "token_ids": torch.randint(0, shape.vocab_size, (TOKENS,)),
        "aux": torch.randn(TOKENS, 3, shape.hidden_size),
        "target": torch.randn(TOKENS, shape.vocab_size) * 3,
    }
    save_file(data, tmp_path / "inputs.safetensors")
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = {name: dict(shape)[name] for name in names} | {
        "num_hidden_layers": 1,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": 512,
        "rope_parameters": shape.rope,
        "pad_token_id": 0,
        "fc_norm": fc_norm,
    }
    paths = {name: str(tmp_path / f"{name}.safetensors") for name in ("weights", "inputs", "output")}
    (tmp_path / "case.json").write_text(json.dumps(paths | {"ttt_steps": TTT_STEPS, "config": config}))
    driver = Path(__file__).with_name("specforge_driver.py")
    run = subprocess.run([peer_python(SPECFORGE), driver, tmp_path / "case.json"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]

    rows_KR = torch.stack([torch.arange(TOKENS - 1) < TOKENS - 1 - step for step in range(TTT_STEPS)])
    pack = make_pack([Document(data["token_ids"], data["aux"], data["target"], rows_KR)], shape, torch.device("cpu"))
    weights = [1 / (TOKENS - 1)] * TTT_STEPS
    loss, scores = score_pack(drafter, lambda target: target, pack, weights, mixture({"soft_ce": 1.0}))
    loss.backward()
    theirs = load_file(tmp_path / "output.safetensors")
    ours = torch.stack([score.loss_sum for score in scores]) / (TOKENS - 1)
    assert float((ours / theirs["losses"] - 1).abs().max()) < 1e-5
    for name, parameter in drafter.named_parameters():
        if parameter.grad is not None:
            grad = theirs[f"grad.{name.replace('layers.0.', 'midlayer.')}"]
            assert float((parameter.grad - grad).norm() / grad.norm()) < 1e-4, name
