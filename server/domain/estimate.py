"""GPU memory of a stage, from sizes alone. Pure; whoever calls it has read the headers.

T tokens of the longest row, K TTT steps, A aux states, H hidden, I intermediate, V verifier vocabulary, D draft
vocabulary, nq / nkv heads of width hd. Everything is float32 unless said otherwise; autocast to bfloat16 keeps next to
nothing less, as weights, softmax and logits stay float32 beside the copies.

    train     16 bytes a trained number: weight, gradient, two moments of AdamW
              embedding V x H as the verifier stores it; the verifier's head rows D x H
              states (A + 1) x H and the verifier's probabilities D, for each of T tokens
              for each TTT step and token, kept for the backward pass:
                  attention weights nq x T, queries, keys, values, the streams between, 4 x I of the MLP, 3 x D logits
              three times the attention weights of one step while they are computed
    extract   the verifier's numbers in `dtype`; captured states (A + 1) x H of batch_tokens tokens
    evaluate  the verifier's and the drafter's numbers
"""

from dataclasses import dataclass

from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.params import ExtractParams, TrainParams
from server.domain.space import DTYPE_BYTES, DrafterSize, shown

FLOAT32 = 4
ADAMW_BYTES = 4 * FLOAT32


@dataclass(frozen=True)
class Estimate:
    """Bytes, about, and the arithmetic in words."""

    bytes: int
    basis: str


def kept_for_backward(config: DrafterConfig, tokens: int, ttt_steps: int) -> int:
    """Bytes that one row's forward pass keeps, all its tokens counted.

    Args:
        config: of the drafter.
        tokens: T, of the row.
        ttt_steps: K.
    """
    heads = (2 * config.num_attention_heads + 3 * config.num_key_value_heads) * config.head_dim
    streams = 12 * config.hidden_size + 4 * config.intermediate_size + heads
    numbers = config.num_attention_heads * tokens + streams + 3 * config.draft_vocab_size
    return tokens * ttt_steps * numbers * FLOAT32


def train_memory(
    params: TrainParams, config: DrafterConfig, size: DrafterSize, embedding_bytes: int, longest: int | None
) -> Estimate:
    """GPU memory of a training at its most.

    Args:
        params: the request.
        config: of the drafter.
        size: how many numbers it holds.
        embedding_bytes: of the verifier's embedding as it is stored.
        longest: tokens of the longest row; None where it is not known, then `max_seq_len`.
    """
    tokens = min(longest or params.max_seq_len, params.max_seq_len)
    head = size.draft_vocab_size * size.hidden_size
    trained = size.body + (head if params.train_head else 0)
    fixed = trained * ADAMW_BYTES + embedding_bytes + head * FLOAT32 + (0 if params.train_head else head * FLOAT32)
    data = tokens * ((config.num_aux_states + 1) * size.hidden_size + 2 * size.draft_vocab_size) * FLOAT32
    passing = 3 * config.num_attention_heads * tokens * tokens * FLOAT32
    kept = kept_for_backward(config, tokens, params.ttt_steps)
    total = fixed + data + passing + kept
    return Estimate(
        total,
        f"about: {shown(trained * ADAMW_BYTES)} for {trained:,} trained numbers x 16 bytes (weight, gradient, two "
        f"moments), {shown(embedding_bytes)} embedding, {shown(head * FLOAT32)} of the verifier's head, "
        f"{shown(data + passing + kept)} for one row of {tokens} tokens over {params.ttt_steps} TTT steps",
    )


def extract_memory(params: ExtractParams, numbers: int, hidden_size: int, aux_states: int) -> Estimate:
    """GPU memory of an extraction at least; what the verifier needs for its own forward pass is not known."""
    width = DTYPE_BYTES[params.dtype]
    states = params.batch_tokens * (aux_states + 1) * hidden_size * width
    return Estimate(
        numbers * width + states,
        f"at least: {numbers:,} numbers of the verifier x {width} bytes ({params.dtype}), {shown(states)} of states "
        f"for {params.batch_tokens} tokens; the forward pass itself comes on top",
    )


def evaluate_memory(numbers: int, drafter_numbers: int) -> Estimate:
    """GPU memory of an evaluation at least."""
    return Estimate(
        (numbers + drafter_numbers) * FLOAT32,
        f"at least: {numbers:,} numbers of the verifier and {drafter_numbers:,} of the drafter x 4 bytes (float32); "
        "the forward pass and its keys come on top",
    )
