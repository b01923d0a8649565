"""The training step of SpecForge: its model, eager, AdamW. Its loss is a Triton kernel; its own torch reference stands
in for it.
"""

import importlib.metadata
import os
import warnings

os.environ["TORCHDYNAMO_DISABLE"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from driver import (  # noqa: E402
    GRAD_CLIP,
    LEARNING_RATE,
    TTT_STEPS,
    arguments,
    head_weight,
    kept_tokens,
    make_data,
    serve,
)
from specforge.algorithms.eagle3 import model as eagle3  # noqa: E402
from specforge.core.loss import _compute_loss  # noqa: E402
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from transformers import LlamaConfig  # noqa: E402


class TorchLoss:
    """Stands in for the Triton kernel."""

    apply = staticmethod(_compute_loss)


eagle3.LogSoftmaxLoss = TorchLoss

size, half, train_head = arguments()
data = make_data(size, half)
config = LlamaConfig(
    hidden_size=size.hidden,
    intermediate_size=size.intermediate,
    num_attention_heads=size.heads,
    num_key_value_heads=size.heads,
    vocab_size=size.vocab,
    num_hidden_layers=1,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
    pad_token_id=0,
)
config.draft_vocab_size = size.draft
drafter = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
t2d = kept_tokens(size)
drafter.t2d.copy_(t2d)
drafter.d2t.copy_(t2d.nonzero()[:, 0] - torch.arange(size.draft))
head = head_weight(size)
with torch.no_grad():
    drafter.lm_head.weight.copy_(head[t2d])
drafter.lm_head.weight.requires_grad_(train_head)
drafter.embed_tokens.weight.requires_grad_(False)
model = eagle3.OnlineEagle3Model(drafter, length=TTT_STEPS, attention_backend="sdpa")
parameters = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
states = torch.nn.functional.rms_norm(data.last[1:], (size.hidden,), eps=1e-5)


def step() -> float:
    # As its offline strategy does: the verifier's head over the whole vocabulary, from stored states behind the norm.
    with torch.no_grad():
        target = (states @ head.T)[None]
    losses, *_ = model(
        input_ids=data.tokens[1:][None],
        attention_mask=torch.ones(1, size.rows, dtype=torch.int64),
        target=target,
        loss_mask=data.mask[1:][None, :, None].long(),
        hidden_states=data.aux[:-1][None],
    )
    loss = torch.stack(losses).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


serve(step, {"version": importlib.metadata.version("specforge")})
