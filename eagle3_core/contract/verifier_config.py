"""A verifier's config.json in one form, whatever family and version wrote it. Standard library only.

Sizes of multi-modal models stand in a nested text config; what the text config leaves out is looked up outside.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_core.contract.families import UNKNOWN, Family, family_of
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.contract.rope import normalise_rope
from eagle3_core.errors import BadInput

_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")

_SYNONYMS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "max_position_embeddings": ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions"),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon"),
}


@dataclass(frozen=True)
class VerifierConfig:
    """Sizes and settings a drafter needs to know of its verifier. None: not stated anywhere."""

    file: Path
    text: Mapping[str, Any]
    architectures: tuple[str, ...]
    model_type: str
    vocab_size: int | None
    hidden_size: int
    num_hidden_layers: int
    tied: bool | None
    family: Family
    warnings: list[tuple[str, str]] = field(default_factory=list)

    def number(self, key: str) -> int | None:
        """A positive whole number of the text config, under any of its names; null counts as absent.

        Raises:
            BadInput: it is there and is something else.
        """
        return _number(self.file, self.text, key)

    def need(self, key: str) -> int:
        """`number`, and an error naming the key where it is absent."""
        value = self.number(key)
        if value is None:
            raise BadInput(f"{self.file}: {key} is missing")
        return value

    def real(self, key: str) -> float | None:
        """A finite number of the text config; null counts as absent."""
        for name in _SYNONYMS.get(key, (key,)):
            value = self.text.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e30:
                    raise BadInput(f"{self.file}: {name} is {value!r}, not a number")
                return float(value)
        return None

    @property
    def is_mla(self) -> bool:
        """Multi-head latent attention (DeepSeek, Kimi): no plain q/k/v of one width."""
        return self.text.get("kv_lora_rank") is not None

    def rope(self) -> dict[str, Any]:
        """The rope settings in one layout; adds to `warnings`."""
        rope, warnings = normalise_rope(self.text, str(self.file), self.family.rope_theta)
        self.warnings.extend(warnings)
        return rope

    def logit_scale(self) -> float:
        """What the logits are multiplied by behind the head."""
        for key, how in self.family.scale:
            value = self.real(key)
            if value is None:
                continue
            if value == 0:
                raise BadInput(f"{self.file}: {key} is 0, and logits would be nothing or without bound")
            return 1 / value if how == "divide" else value / self.hidden_size if how == "width" else value
        return 1.0

    def softcap(self) -> float | None:
        """The bound the logits are pressed into, if there is one."""
        key = self.family.softcap
        if key is None:
            return None
        value = self.real(key) if key in self.text else self.family.default_softcap
        if value is not None and value <= 0:
            raise BadInput(f"{self.file}: {key} is {value:g}, not a positive number")
        return value


def read_verifier_config(path: Path) -> VerifierConfig:
    """The config of a verifier directory.

    Raises:
        BadInput: no such directory, no config.json, or sizes that are missing or no numbers.
    """
    if not path.is_dir():
        raise BadInput(f"{path}: no such directory" if not path.exists() else f"{path}: is not a directory")
    file = path / "config.json"
    if not file.exists() and (snapshots := sorted(path.glob("snapshots/*/config.json"))):
        raise BadInput(f"{path}: is a model's place in a cache; give the snapshot itself: {snapshots[0].parent}")
    whole = read_json_object(file)
    _check_kind(file, whole)
    inner = _text_config(whole)
    # What a text config leaves out is said outside it, save for keys that mean the wrapper.
    outer = {key: value for key, value in whole.items() if key not in {"architectures", "model_type", *_TEXT_KEYS}}
    stated = {key: value for key, value in inner.items() if value is not None or key not in outer}
    text = {**outer, **stated} if inner else whole
    architectures = whole.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise BadInput(f"{file}: architectures is {architectures!r}, not a list of names")
    kinds = [kind for kind in (text.get("model_type"), whole.get("model_type")) if isinstance(kind, str)]
    hidden, layers = _number(file, text, "hidden_size"), _number(file, text, "num_hidden_layers")
    for key, value in (("hidden_size", hidden), ("num_hidden_layers", layers)):
        if value is None:
            raise BadInput(f"{file}: {key} is missing, at the top level and in {', '.join(_TEXT_KEYS)}")
    assert hidden is not None
    assert layers is not None
    warnings: list[tuple[str, str]] = []
    family = family_of(kinds)
    if family is None:
        warnings.append(
            (
                "unknown_family",
                f"{file}: model_type {kinds[0] if kinds else None!r} is not known here: norm and logits are read by "
                "the names of keys, and extraction compares them with the verifier's own",
            )
        )
        family = UNKNOWN
    return VerifierConfig(
        file=file,
        text=text,
        architectures=tuple(architectures),
        model_type=kinds[0] if kinds else "",
        vocab_size=_number(file, text, "vocab_size"),
        hidden_size=hidden,
        num_hidden_layers=layers,
        tied=_tied(file, whole, inner, family, warnings),
        family=family,
        warnings=warnings,
    )


def _check_kind(file: Path, whole: Mapping[str, Any]) -> None:
    """Refuse configs of what is no decoder with a head."""
    if "draft_vocab_size" in whole or "speculators_config" in whole:
        raise BadInput(f"{file}: is the config of a drafter; the verifier is the model that it drafts for")
    if whole.get("is_encoder_decoder") is True:
        raise BadInput(f"{file}: is_encoder_decoder is true, and only decoders can be verifiers")


def _text_config(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The innermost text config, empty where the sizes stand at the top."""
    for key in _TEXT_KEYS:
        inner = whole.get(key)
        if isinstance(inner, dict) and inner:
            return _text_config(inner) or inner
    return {}


def _number(file: Path, config: Mapping[str, Any], key: str) -> int | None:
    for name in _SYNONYMS.get(key, (key,)):
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 < value < 2**40:
            raise BadInput(f"{file}: {name} is {value!r}, not a positive whole number")
        return value
    return None


def _tied(
    file: Path,
    whole: Mapping[str, Any],
    inner: Mapping[str, Any],
    family: Family,
    warnings: list[tuple[str, str]],
) -> bool | None:
    """tie_word_embeddings; None: neither stated, or both, nor known of the family."""
    stated = {}
    for title, config in (("", whole), ("the text config's ", inner)):
        value = config.get("tie_word_embeddings")
        if value is None:
            continue
        if not isinstance(value, bool):
            raise BadInput(f"{file}: {title}tie_word_embeddings is {value!r}, not true or false")
        stated[title] = value
    if len(set(stated.values())) == 2:
        warnings.append(
            ("tied_flag_conflict", f"{file}: tie_word_embeddings differs between the top level and the text config")
        )
        return None
    if stated:
        return next(iter(stated.values()))
    return family.tied
