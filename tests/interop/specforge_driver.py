"""Runs inside SpecForge's own venv: its per-step losses and gradients on given weights and inputs, eager, on the CPU.

usage: python specforge_driver.py CASE.json, {"weights", "inputs", "output", "ttt_steps", "config"}
"""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from specforge.algorithms.eagle3 import model as eagle3  # noqa: E402
from specforge.core.loss import _compute_loss  # noqa: E402
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from transformers import LlamaConfig  # noqa: E402


class TorchLoss:
    """Stands in for its Triton kernel: its own reference."""

    apply = staticmethod(_compute_loss)


eagle3.LogSoftmaxLoss = TorchLoss
case = json.loads(Path(sys.argv[1]).read_text())
config = LlamaConfig(**case["config"])
config.draft_vocab_size = config.vocab_size
config.fc_norm = case["config"]["fc_norm"]
drafter = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
missing, unexpected = drafter.load_state_dict(load_file(case["weights"]), strict=False)
assert set(missing) == {"t2d", "d2t"}, missing
assert not unexpected, unexpected
drafter.embed_tokens.weight.requires_grad_(False)
data = load_file(case["inputs"])
rows = len(data["token_ids"]) - 1
losses, *_ = eagle3.OnlineEagle3Model(drafter, length=case["ttt_steps"], attention_backend="sdpa")(
    input_ids=data["token_ids"][1:][None],
    attention_mask=torch.ones(1, rows, dtype=torch.int64),
    target=data["target"][1:][None],
    loss_mask=torch.ones(1, rows, 1, dtype=torch.int64),
    hidden_states=data["aux"][:-1].flatten(1)[None],
)
torch.stack(losses).sum().backward()
out = {f"grad.{name}": p.grad.contiguous() for name, p in drafter.named_parameters() if p.grad is not None}
save_file(out | {"losses": torch.stack(losses).detach()}, case["output"])
