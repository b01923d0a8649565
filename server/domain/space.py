"""How many bytes a job will write, from sizes alone. Pure: whoever calls it has read the headers.

    prepare    tokens x 5, prompts, vocabulary map      roughly, from the size of the conversations
    extract    tokens x (aux + 1) states x hidden x bytes of store_dtype, ids and masks
    train      one checkpoint x as many as lie there at once
    others     next to nothing; external: not known

A checkpoint is the drafter in bfloat16 with the verifier's embedding, and two float32 moments of each trained number.
"""

from dataclasses import dataclass
from math import prod

from eagle3_core.contract.drafter_config import DrafterConfig, expected_tensors
from eagle3_core.contract.params import ExtractParams, TrainParams

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3": 1}
SMALL = 1_000_000
"""A report, a verdict: what the other stages write."""

_IDS_AND_MASK = 8 + 1
_SCALE = 4
"""Of float8_e4m3, for each token and layer."""
_ROW_ENTRY = 256
_SHARD_OVERHEAD = 1024
_STATE_TENSORS = 3 * 1024
"""What torch.save adds for each trained tensor: two moments and a step."""

_CONFIGS = 64 << 10


@dataclass(frozen=True)
class Need:
    """What a job will write.

    Attributes:
        bytes: at most, about; None where it cannot be known yet, or at all.
        basis: the arithmetic in words, or why it is not known.
        hint: what makes it smaller.
    """

    bytes: int | None
    basis: str
    hint: str = "name an output_dir with more room"


def prepare_need(conversations_bytes: int, vocab_size: int) -> Need:
    """Of prepare: a token for every four bytes of text, five bytes each, twice while they are put together; digests."""
    return Need(
        3 * conversations_bytes + 17 * vocab_size,
        f"about three times the {shown(conversations_bytes)} of conversations, more where they are compressed",
    )


def extract_need(params: ExtractParams, tokens: int, rows: int, aux_states: int, hidden_size: int) -> Need:
    """Of extract: every hidden state, as `hidden_states` of the shards holds them."""
    width = DTYPE_BYTES[params.store_dtype]
    states = tokens * (aux_states + 1) * (hidden_size * width + (_SCALE if width == 1 else 0))
    shards = states // (params.shard_mb * 1_000_000) + 1
    return Need(
        states + tokens * _IDS_AND_MASK + rows * _ROW_ENTRY + shards * _SHARD_OVERHEAD,
        f"{tokens:,} tokens x {aux_states + 1} states x {hidden_size} x {width} bytes ({params.store_dtype})",
        "prepare fewer conversations, or name an output_dir with more room",
    )


@dataclass(frozen=True)
class DrafterSize:
    """How many numbers a drafter holds: embedding, head, everything else, and in how many tensors."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    body: int
    tensors: int


def size_of(config: DrafterConfig) -> DrafterSize:
    """Of a drafter whose config is known."""
    outside = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    body = [prod(shape) for name, (shape, _) in expected_tensors(config).items() if name not in outside]
    return DrafterSize(config.vocab_size, config.draft_vocab_size, config.hidden_size, sum(body), len(body) + 1)


def checkpoint_bytes(size: DrafterSize, params: TrainParams) -> int:
    """Bytes of one checkpoint: weights, optimizer, schedule, configs and manifest."""
    head, embedding = size.draft_vocab_size * size.hidden_size, size.vocab_size * size.hidden_size
    weights = (embedding + head + size.body) * DTYPE_BYTES["bfloat16"]
    maps = 8 * size.draft_vocab_size + size.vocab_size
    trained = size.body + (head if params.train_head else 0) + (embedding if params.train_embedding else 0)
    return weights + maps + trained * 2 * DTYPE_BYTES["float32"] + size.tensors * _STATE_TENSORS + _CONFIGS


def checkpoints_at_once(params: TrainParams) -> int:
    """How many lie there when they are most: those kept, one being written or judged, one within an epoch."""
    kept = params.epochs
    if params.keep_last is not None:
        best = 1 if params.val_ratio else 0
        every = params.epochs // params.keep_every if params.keep_every else 0
        kept = min(params.epochs, params.keep_last + best + every + 1)
    return kept + 1


def train_need(params: TrainParams, size: DrafterSize) -> Need:
    """Of train: its checkpoints."""
    one, number = checkpoint_bytes(size, params), checkpoints_at_once(params)
    rule = f"keep_last {params.keep_last}" if params.keep_last is not None else "all kept"
    return Need(
        one * number,
        f"{number} checkpoints x {shown(one)} at once ({params.epochs} epochs, {rule}, one within an epoch)",
        "set keep_last, or name an output_dir with more room",
    )


def shown(size: int) -> str:
    """`828.0 GB`; decimal units, as disks are sold."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
