"""Rotary position settings of any config layout, brought into one. Standard library only.

    rope_theta + rope_scaling {"type" | "rope_type", ...}                 transformers 4
    rope_parameters {"rope_type", "rope_theta", ...}                      transformers 5, flat
    rope_parameters {"full_attention": {...}, "sliding_attention": {...}} transformers 5, per kind of attention
                              |
                              v
    {"rope_type": "default" | "linear" | ..., "rope_theta": float, scaling fields ...}

Source: transformers 5.19.0 `modeling_rope_utils.py`; its standardize_rope_params lets `rope_parameters` win over
`rope_theta`.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

from eagle3_core.errors import BadInput

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
"""The types transformers knows; any other is an error, never a default."""

_ALIASES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn", "none": "default"}
"""Older names. Multi-modal sections (mrope) are the plain form where all three positions are equal, as in text."""

_NOT_FOR_TEXT = frozenset({"type", "mrope_section", "mrope_interleaved", "partial_rotary_factor"})

_LEAST = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), 1e-6),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), 0),
    "original_max_position_embeddings": 2,
}
"""Scaling fields that are numbers, and what none of them is below; zero where readers take it for a default."""

_LARGEST = 1e12
_LISTS = ("short_factor", "long_factor")

_OF_A_SECTION = frozenset({"rope_type", "type", "rope_theta", "factor"})
"""No kinds of attention."""

Warnings = list[tuple[str, str]]


def normalise_rope(
    config: Mapping[str, Any], where: str, default_theta: float = 1e4
) -> tuple[dict[str, Any], Warnings]:
    """One flat rope dict from any layout, and what had to be decided on the way.

    Args:
        config: the (text) config that holds the rope keys.
        where: names the file in messages.
        default_theta: the base where the config states none.

    Raises:
        BadInput: a rope type nobody knows, a number that cannot be meant, or a layout that cannot be read.
    """
    warnings: Warnings = []
    section, origin = _section(config, where)
    if other := _contradiction(config):
        warnings.append(("rope_section_conflict", f"{where}: {other}"))
    kind = next((section[key] for key in ("rope_type", "type") if section.get(key) is not None), "default")
    if not isinstance(kind, str) or (kind := _ALIASES.get(kind, kind)) not in ROPE_TYPES:
        raise BadInput(f"{where}: unknown rope_type {kind!r} in {origin}; known are {', '.join(ROPE_TYPES)}")
    older = section.get("type")
    if isinstance(older, str) and _ALIASES.get(older, older) != kind and older != "mrope":
        warnings.append(
            ("rope_type_conflict", f"{where}: {origin}.rope_type is {kind}, type is {older!r}; {kind} is used")
        )
    for key in sorted(_NOT_FOR_TEXT & section.keys() - {"type"}):
        if key != "partial_rotary_factor" or section[key] != 1.0:
            warnings.append(("rope_field_dropped", f"{where}: {origin}.{key} means nothing to a drafter: left out"))
    theta = _base(config, section, where, origin, default_theta, warnings)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    dropped = _NOT_FOR_TEXT | {"rope_type", "rope_theta"}
    rope |= {key: value for key, value in section.items() if key not in dropped and value is not None}
    longest, original = config.get("max_position_embeddings"), config.get("original_max_position_embeddings")
    if kind != "default" and original is not None:
        rope.setdefault("original_max_position_embeddings", original)
    _check_numbers(rope, where)
    stated = rope.get("original_max_position_embeddings")
    if kind in ("yarn", "longrope") and "factor" not in rope and stated is not None and _is_number(longest):
        rope["factor"] = longest / stated  # as Phi-3 leaves it to its readers
    if kind in ("yarn", "longrope", "llama3") and _is_number(longest):
        rope.setdefault("original_max_position_embeddings", longest)  # as transformers takes it
    return rope, warnings


def _check_numbers(rope: Mapping[str, Any], where: str) -> None:
    """Refuse a scaling field that is no number a rotation can be computed from."""
    for key in sorted(rope.keys() & _LEAST.keys()):
        if not _is_number(rope[key]) or rope[key] < _LEAST[key]:
            raise BadInput(
                f"{where}: {key} of rope is {rope[key]!r:.80}, not a number from {_LEAST[key]} to {_LARGEST:g}"
            )
    for key in _LISTS:
        values = rope.get(key, [1.0])
        if not isinstance(values, list) or not values or not all(_is_number(value) and value > 0 for value in values):
            raise BadInput(f"{where}: {key} of rope is {values!r:.80}, not a list of positive numbers")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _section(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The dict that holds type and scaling, and the key it came from."""
    for key in ("rope_parameters", "rope_scaling"):
        section = config.get(key)
        if section is None or section == {}:
            continue
        if not isinstance(section, dict):
            raise BadInput(f"{where}: {key} is {section!r}, not an object")
        nested = {k: value for k, value in section.items() if isinstance(value, dict) and k not in _OF_A_SECTION}
        if not nested:
            return section, key
        whole = ["full_attention"] if "full_attention" in nested else [name for name in nested if not _is_local(name)]
        if len(whole) == 1:
            return nested[whole[0]], f"{key}.{whole[0]}"
        if len({repr(sorted(value.items())) for value in nested.values()}) == 1:
            name, value = next(iter(nested.items()))
            return value, f"{key}.{name}"
        raise BadInput(
            f"{where}: {key} differs between {', '.join(sorted(nested))} and has no full_attention; "
            "it is not clear which one the drafter should follow"
        )
    return {}, "config"


def _contradiction(config: Mapping[str, Any]) -> str | None:
    """Where both layouts stand and say different things; the older one wins in transformers of either layout."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if not (isinstance(new, dict) and new and isinstance(old, dict) and old):
        return None
    kinds = [section.get("rope_type") or section.get("type") for section in (new, old)]
    differing = sorted(key for key in (new.keys() & old.keys()) - {"type", "rope_type"} if new[key] != old[key])
    if kinds[0] == kinds[1] and not differing:
        return None
    return f"rope_parameters and rope_scaling differ in {', '.join(differing or ['rope_type'])}"


def _is_local(name: str) -> bool:
    """Whether a kind of attention looks at a part of the text only."""
    return any(word in name for word in ("sliding", "local", "window", "chunked"))


def _base(
    config: Mapping[str, Any], section: dict[str, Any], where: str, origin: str, default: float, warnings: Warnings
) -> float:
    theta, top = section.get("rope_theta"), config.get("rope_theta", config.get("rotary_emb_base"))
    if theta is not None and top is not None and theta != top:
        warnings.append(
            ("rope_base_conflict", f"{where}: {origin}.rope_theta is {theta}, rope_theta is {top}; {theta} is used")
        )
    chosen = theta if theta is not None else top
    if chosen is None:
        chosen = default
        warnings.append(("rope_base_absent", f"{where}: no rope_theta; {chosen:g} is used, the default of its class"))
    if not _is_number(chosen) or chosen <= 1:
        raise BadInput(f"{where}: rope_theta is {chosen!r}, not a number above 1")
    return float(chosen)
