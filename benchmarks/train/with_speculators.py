"""The training step of speculators: its model class, its torch loss (the fused one needs a GPU), AdamW."""

import importlib.metadata
import json
import tempfile
import warnings
from pathlib import Path

import torch
from driver import GRAD_CLIP, LEARNING_RATE, TTT_STEPS, arguments, head_weight, kept_tokens, make_data, serve
from safetensors.torch import save_file
from torch.nn.attention.flex_attention import create_mask

warnings.simplefilter("ignore")
from speculators.config import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.losses import eager  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

size, half, train_head = arguments()
data = make_data(size, half)
layer = {
    "hidden_size": size.hidden,
    "intermediate_size": size.intermediate,
    "num_attention_heads": size.heads,
    "num_key_value_heads": size.heads,
    "vocab_size": size.vocab,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
with tempfile.TemporaryDirectory() as verifier:
    LlamaConfig(**layer, num_hidden_layers=8, architectures=["LlamaForCausalLM"]).save_pretrained(verifier)
    tensors = {
        "model.embed_tokens.weight": torch.randn(size.vocab, size.hidden),
        "model.norm.weight": torch.ones(size.hidden),
        "lm_head.weight": head_weight(size),
    }
    save_file(tensors, f"{verifier}/model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    Path(verifier, "model.safetensors.index.json").write_text(json.dumps(index))
    del tensors
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=LlamaConfig(**layer, num_hidden_layers=1, attn_implementation="sdpa"),
            draft_vocab_size=size.draft,
            norm_before_residual=False,
            norm_output=False,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=verifier, architectures=["LlamaForCausalLM"]),
            ),
        )
    )
    t2d = kept_tokens(size)
    model.load_vocab_mappings(t2d, t2d.nonzero()[:, 0] - torch.arange(size.draft))
    model.load_verifier_weights()
model._create_mask_fn = create_mask
model.lm_head.weight.requires_grad_(train_head)
parameters = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
inputs = {
    "hidden_states": data.aux[:-1][None],
    "input_ids": data.tokens[1:][None],
    "document_ids": torch.zeros(1, size.rows, dtype=torch.int64),
    "loss_mask": data.mask[1:][None].long(),
    "verifier_last_hidden_states": data.last[1:][None],
}


def step() -> float:
    _, loss, _ = model(**inputs, ttt_steps=TTT_STEPS, loss_config={"kl_div": (eager.kl_div_loss, 1.0)})
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


serve(step, {"version": importlib.metadata.version("speculators"), "trained": sum(p.numel() for p in parameters)})
