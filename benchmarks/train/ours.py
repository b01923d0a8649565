"""Our training step."""

import torch
from driver import GRAD_CLIP, LEARNING_RATE, TTT_STEPS, arguments, head_weight, kept_tokens, make_data, serve

from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.training.engine import Document, make_pack, score_pack
from eagle3_core.training.ttt import counted_rows

size, half, train_head = arguments()
data = make_data(size, half)
config = DrafterConfig(
    hidden_size=size.hidden,
    intermediate_size=size.intermediate,
    num_attention_heads=size.heads,
    num_key_value_heads=size.heads,
    head_dim=size.hidden // size.heads,
    vocab_size=size.vocab,
    draft_vocab_size=size.draft,
    aux_layer_ids=(2, 4, 5),
    rope={"rope_type": "default", "rope_theta": 10000.0},
)
drafter = Eagle3Drafter(config)
head = head_weight(size)[kept_tokens(size)].contiguous()
with torch.no_grad():
    drafter.lm_head.weight.copy_(head)
drafter.lm_head.weight.requires_grad_(train_head)
parameters = [p for p in drafter.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
document = Document(data.tokens, data.aux.unflatten(1, (3, -1)), data.last, counted_rows(data.mask, TTT_STEPS))


def target_head(states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(states, (size.hidden,), eps=config.rms_norm_eps) @ head.T


def step() -> float:
    pack = make_pack([document], config, torch.device("cpu"))
    weights = [1.0 / max(1, count) for count in pack.plan.counts]
    loss, _ = score_pack(drafter, target_head, pack, weights)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


serve(step, {"counted": make_pack([document], config, torch.device("cpu")).plan.counts})
