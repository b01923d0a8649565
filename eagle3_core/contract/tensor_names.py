"""Finding embedding, head and final norm among the names of a verifier's tensors. Standard library only.

A name is a prefix of dotted parts and a leaf. Candidates are ranked, never matched by ending alone:

    rank 0   the plain name                model.embed_tokens.weight       lm_head.weight          model.norm.weight
    rank 1   a known wrapper               language_model.model.* / model.language_model.* / thinker.model.* ...
    rank 2   only wrapper words in front   any other order of model, language_model, text_model, llm ...
    never    anything else in front        mtp, layers, 61, visual, audio, draft ...

One candidate in the best rank wins; two are an error that lists them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from eagle3_core.errors import BadInput

WRAPPER_WORDS = frozenset(
    (
        "model",
        "language_model",
        "text_model",
        "llm",
        "lm",
        "lang_model",
        "llm_model",
        "causal_lm",
        "language",
        "text",
        "text_decoder",
        "language_backbone",
        "thinker",
        "module",
        "transformer",
        "base_model",
        "backbone",
        "decoder",
        "gpt_neox",
        "_orig_mod",
    )
)

_KNOWN_PREFIXES = frozenset(
    (
        "language_model.model.",
        "model.language_model.",
        "model.language_model.model.",
        "language_model.",
        "thinker.model.",
        "thinker.language_model.model.",
        "model.text_model.",
        "text_model.model.",
        "text_model.",
        "llm.model.",
        "model.llm.",
        "",
    )
)
_KNOWN_HEAD_PREFIXES = frozenset(
    ("language_model.", "model.", "thinker.", "model.language_model.", "language_model.model.", "text_model.", "llm.")
)


@dataclass(frozen=True)
class Role:
    """What a tensor is to the verifier, and the leaf names it goes by."""

    title: str
    plain: str
    leaves: tuple[str, ...]
    known_prefixes: frozenset[str]


EMBEDDING = Role(
    "embedding",
    "model.embed_tokens.weight",
    ("embed_tokens", "word_embeddings", "tok_embeddings", "wte", "embed_in", "embeddings", "embedding"),
    _KNOWN_PREFIXES,
)
HEAD = Role("head", "lm_head.weight", ("lm_head", "embed_out", "output", "output_layer"), _KNOWN_HEAD_PREFIXES)
FINAL_NORM = Role(
    "final norm",
    "model.norm.weight",
    ("norm", "final_norm", "final_layernorm", "norm_f", "ln_f", "embedding_norm"),
    _KNOWN_PREFIXES,
)

QUANTISED_SUFFIXES: tuple[tuple[str, str], ...] = (
    (".weight_packed", "compressed-tensors, packed integers"),
    (".qweight", "GPTQ/AWQ, packed integers"),
    (".weight_scale_2", "FP4 with two scales"),
    (".weight_global_scale", "FP4 with two scales"),
    (".weight_scale_inv", "block-wise FP8"),
    (".weight_scale", "scaled integers or FP8"),
    (".weight_shape", "compressed-tensors, packed integers"),
    (".weight_zero_point", "scaled integers"),
    (".weight.absmax", "bitsandbytes"),
    (".weight.quant_map", "bitsandbytes"),
    (".SCB", "bitsandbytes int8"),
    (".scales", "scaled integers"),
    (".qzeros", "GPTQ/AWQ, packed integers"),
    (".weight_quantizer._scale", "a quantiser of its own"),
    (".weight_blocks", "MXFP4, packed"),
    (".W_q", "HQQ, packed"),
    (".weight._data", "quanto"),
    (".codes", "AQLM, codes"),
    (".weight.bitsandbytes__nf4", "bitsandbytes NF4"),
    (".weight.bitsandbytes__fp4", "bitsandbytes FP4"),
)
"""What stands beside or instead of `.weight` when a matrix is quantised, and the scheme that does so."""

_WEIGHT_SUFFIXES = (".weight", ".weight_packed", ".qweight", ".weight_blocks", ".W_q", ".weight._data", ".codes")


def find_base(role: Role, names: Collection[str], sibling_prefix: str | None = None) -> str | None:
    """The name without `.weight` of the one tensor that plays a role; None when nothing fits.

    Args:
        role: what is looked for.
        names: all tensor names of the verifier.
        sibling_prefix: prefix of the embedding; settles a tie, since towers do not share theirs.

    Raises:
        BadInput: two candidates and no rule between them.
    """
    ranked: dict[tuple[int, int], set[str]] = {}
    for name in names:
        base = _without_suffix(name)
        if base is None:
            continue
        rank = _rank(role, base)
        if rank is not None:
            ranked.setdefault(rank, set()).add(base)
    if not ranked:
        return None
    best = sorted(ranked[min(ranked)])
    if len(best) > 1 and sibling_prefix is not None:
        best = [base for base in best if base.rpartition(".")[0] + "." == sibling_prefix] or best
    if len(best) > 1:
        raise BadInput(f"{len(best)} tensors could be the {role.title}, and no rule chooses: {', '.join(best)}")
    return best[0]


def near_names(role: Role, names: Iterable[str], limit: int = 8) -> list[str]:
    """Names a person would look at when no candidate fits."""
    words = (*role.leaves[:5], "embed") if role is EMBEDDING else role.leaves[:5]
    near = [name for name in names if any(word in part for part in name.split(".")[-4:] for word in words)]
    return sorted(near, key=lambda name: (name.count("."), name))[:limit]


def _without_suffix(name: str) -> str | None:
    return next((name.removesuffix(suffix) for suffix in _WEIGHT_SUFFIXES if name.endswith(suffix)), None)


def _rank(role: Role, base: str) -> tuple[int, int] | None:
    """(rank, position of the leaf) of a candidate, None for a name that is none."""
    prefix, _, leaf = base.rpartition(".")
    if leaf not in role.leaves:
        return None
    if f"{base}.weight" == role.plain:
        return (0, 0)
    spelling = role.leaves.index(leaf)
    if (f"{prefix}." if prefix else "") in role.known_prefixes or (role is HEAD and not prefix):
        return (1, spelling)
    if all(part in WRAPPER_WORDS for part in prefix.split(".")):
        return (2, spelling)
    return None
