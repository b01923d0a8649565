"""Samples the verifier's own answers to a list of prompts, as conversations in JSONL."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


def sample_responses(verifier: Path, prompts: list[str], output: Path, max_new_tokens: int, batch_size: int) -> None:
    """Write {"messages": [user, assistant]} lines, the answers greedy, in bfloat16.

    An answer that does not end within `max_new_tokens` is kept as far as it goes: rows must be cut before its end,
    since the verifier did not say that it ends there.
    """
    tokenizer = AutoTokenizer.from_pretrained(verifier)
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.bfloat16).eval()
    lines = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        for prompt, answer in zip(batch, _answers(model, tokenizer, batch, max_new_tokens), strict=True):
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": messages}))
        print(f"  sampled {len(lines)} of {len(prompts)} answers", flush=True)
    temporary = output.with_suffix(".tmp")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.rename(output)


@torch.inference_mode()
def _answers(model, tokenizer, prompts: list[str], max_new_tokens: int) -> list[str]:
    """Greedy answers to one batch, padded on the left."""
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        for prompt in prompts
    ]
    encoded = [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]
    width = max(map(len, encoded))
    ids = torch.tensor([[tokenizer.eos_token_id] * (width - len(row)) + row for row in encoded])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
    cache, said = DynamicCache(), []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(-1) - 1)[:, -ids.shape[1] :].clamp(min=0)
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        said.append(torch.where(done[:, None], tokenizer.eos_token_id, ids))
        done |= ids[:, 0] == tokenizer.eos_token_id
        mask = torch.cat((mask, mask.new_ones(len(prompts), 1)), dim=1)
        if done.all():
            break
    return tokenizer.batch_decode(torch.cat(said, dim=1), skip_special_tokens=True)
