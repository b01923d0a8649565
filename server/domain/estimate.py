"""GPU memory of a stage, from sizes alone. Pure; whoever calls it has read the headers.

T tokens of a pack, K TTT steps, A aux states, H hidden, I intermediate, V verifier vocabulary, D draft
vocabulary, nq / nkv heads of width hd. Everything is float32 unless said otherwise; autocast to bfloat16 keeps next to
nothing less, as weights, softmax and logits stay float32 beside the copies.

    train     16 bytes a trained number: weight, gradient, two moments of AdamW
              embedding V x H as the verifier stores it; the verifier's head rows D x H
              kept for the backward pass, for each of T tokens of a pack: 6 x H, and for each TTT step
                  2.2 x H of the stream, 2.1 x nq x hd of queries and outputs, 2 x nkv x hd of keys and values
              what is computed anew or in chunks: 5 x 256 x D of logits and probabilities
    extract   the verifier's numbers in `dtype`; captured states (A + 1) x H of batch_tokens tokens
    evaluate  the verifier's and the drafter's numbers
"""

from dataclasses import dataclass

from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.params import ExtractParams, TrainParams
from server.domain.space import DTYPE_BYTES, DrafterSize, shown

FLOAT32 = 4
ADAMW_BYTES = 4 * FLOAT32
CHUNK_ROWS = 256
"""Targets whose logits are computed at a time."""


@dataclass(frozen=True)
class Estimate:
    """Bytes, about, and the arithmetic in words."""

    bytes: int
    basis: str


def kept_for_backward(config: DrafterConfig, tokens: int, ttt_steps: int) -> int:
    """Bytes that the forward pass of a pack keeps, all its tokens counted. The factors were measured.

    Args:
        config: of the drafter.
        tokens: T, of the pack.
        ttt_steps: K.
    """
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    step = 2.2 * config.hidden_size + 2.1 * queries + 2 * keys
    return int(tokens * (6 * config.hidden_size + ttt_steps * step)) * FLOAT32


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
    row = min(longest or params.max_seq_len, params.max_seq_len)
    tokens = max(row, params.batch_tokens or params.max_seq_len)
    head = size.draft_vocab_size * size.hidden_size
    embedding = size.vocab_size * size.hidden_size if params.train_embedding else 0
    trained = size.body + (head if params.train_head else 0) + embedding
    fixed = trained * ADAMW_BYTES + embedding_bytes + head * FLOAT32 + (0 if params.train_head else head * FLOAT32)
    passing = 5 * CHUNK_ROWS * size.draft_vocab_size * FLOAT32
    kept = kept_for_backward(config, tokens, params.ttt_steps)
    total = fixed + passing + kept
    return Estimate(
        total,
        f"about: {shown(trained * ADAMW_BYTES)} for {trained:,} trained numbers x 16 bytes (weight, gradient, two "
        f"moments), {shown(embedding_bytes)} embedding, {shown(head * FLOAT32)} of the verifier's head, "
        f"{shown(passing + kept)} for a pack of {tokens} tokens over {params.ttt_steps} TTT steps",
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
