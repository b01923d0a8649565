"""Runs inside the peer's own venv: loads a checkpoint with speculators and writes its loss and gradients.

usage: python speculators_driver.py CASES.json, a list of {"checkpoint", "inputs", "output", "ttt_steps", "decay"}; with
"train" {"batches", "steps", "lr"} it also trains, and writes the loss of every step.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import create_mask

warnings.simplefilter("ignore")
from speculators import SpeculatorModel  # noqa: E402
from speculators.losses import eager  # noqa: E402

torch.set_num_threads(2)
said: list[str] = []


class Collect(logging.Handler):
    """Keeps what the libraries would have printed."""

    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())


for name in (None, "transformers", "speculators"):
    logging.getLogger(name).addHandler(Collect(logging.WARNING))


def loss_of(model, case, inputs):
    """The loss on one file of inputs."""
    data = load_file(inputs)
    rows = len(data["token_ids"]) - 1
    _, loss, _ = model(
        hidden_states=data["aux"][:-1].flatten(1)[None],
        input_ids=data["token_ids"][1:][None],
        document_ids=torch.zeros(1, rows, dtype=torch.int64),
        loss_mask=torch.ones(1, rows, dtype=torch.int64),
        verifier_last_hidden_states=data["last"][1:][None],
        ttt_steps=case["ttt_steps"],
        ttt_step_loss_decay=case["decay"],
        # The default loss is a Triton kernel, which needs a GPU; this is its own torch reference.
        loss_config={"kl_div": (eager.kl_div_loss, 1.0)},
    )
    return loss


def train(model, case):
    """The loss of every optimizer step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=case["train"]["lr"])
    losses = []
    for step in range(case["train"]["steps"]):
        batches = case["train"]["batches"]
        loss = loss_of(model, case, batches[step % len(batches)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


for case in json.loads(Path(sys.argv[1]).read_text()):
    said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = SpeculatorModel.from_pretrained(case["checkpoint"], dtype=torch.float32)
    complaints = said + [str(w.message) for w in caught]
    attention = "sdpa"
    model.config.transformer_layer_config._attn_implementation = attention
    model._attn_impl = attention
    model._create_mask_fn = create_mask
    model.lm_head.weight.requires_grad_(True)
    loss = loss_of(model, case, case["inputs"])
    loss.backward()
    out = {"loss": loss.detach().reshape(1)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            out[f"grad.{name}"] = parameter.grad.contiguous()
    if "train" in case:
        out["losses"] = train(model, case)
    save_file(out, case["output"])
    print(
        json.dumps(
            {
                "class": type(model).__name__,
                "complaints": complaints,
                "aux_layer_ids": model.config.eagle_aux_hidden_state_layer_ids,
            }
        )
    )
