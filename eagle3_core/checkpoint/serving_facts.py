"""What decides whether a server can serve a drafter: read off config and headers once, for the rules to look at.

A aux states, D draft vocabulary, V verifier vocabulary, N the verifier's decoder layers. State k is the residual stream
after k layers.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from eagle3_core.checkpoint.judge_tensors import expected_of
from eagle3_core.checkpoint.judge_verifier import VerifierParts
from eagle3_core.checkpoint.layer_ids import States, default_states, sglang_states
from eagle3_core.checkpoint.weights import DrafterWeights, canonical_name
from eagle3_core.contract.drafter_files import KEPT_KEY, DrafterSource
from eagle3_core.contract.verifier_config import VerifierConfig

Kind = Literal["llama", "qwen3", "mla", "other"]

_AUX_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Facts:
    """A drafter as a server meets it.

    native: in the speculators format; else flat, as vLLM and SGLang call HF style.
    kind: of its layers.
    layer: the config that holds the sizes; `raw` itself unless native.
    nested: eagle_config.
    missing, unknown: canonical names that its config asks for and are not there, and the reverse.
    prefixed: a stored name that begins with `model.`.
    older: a stored name of the norms before fc that SGLang alone knows.
    hidden_norms: whether every layer above 0 has its norm under SGLang's name.
    input_norms: the same of the name that vLLM and speculators use.
    map_sound: false where the judge found d2t wrong.
    family: the verifier's model_type, or its architecture where only that is known.
    """

    source: DrafterSource
    raw: Mapping[str, Any]
    native: bool
    kind: Kind
    layer: Mapping[str, Any]
    nested: Mapping[str, Any]
    names: Set[str]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    prefixed: str | None
    older: str | None
    hidden_norms: bool
    input_norms: bool
    map_sound: bool
    fc_columns: int | None
    embedding_differs: bool
    verifier: VerifierConfig | None
    family: str

    @property
    def reduced(self) -> bool:
        """Whether the drafter's vocabulary is smaller than the verifier's."""
        return self.source.config.draft_vocab_size != self.source.config.vocab_size

    @property
    def width(self) -> int:
        """Of one aux state."""
        return self.source.target_hidden_size or self.source.config.hidden_size

    @property
    def architecture(self) -> str:
        """The first of `architectures`."""
        names = self.raw.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    @property
    def top_ids(self) -> States | None:
        """The layer ids beside the other keys."""
        return _ids(self.raw)

    @property
    def nested_ids(self) -> States | None:
        """The layer ids in eagle_config."""
        return _ids(self.nested)

    @property
    def trained_states(self) -> States | None:
        """The states the drafter was trained on, where that can be known."""
        ids = self.source.config.aux_layer_ids
        if ids is None and self.source.captured_after and self.verifier is not None:
            layers = self.verifier.num_hidden_layers
            return (3, layers // 2 + 1, layers - 2)
        return ids

    @property
    def default_states(self) -> States | None:
        """What both servers feed where they find no ids."""
        return None if self.verifier is None else default_states(self.verifier.num_hidden_layers)

    def vllm_states(self, second_runner: bool) -> States | None:
        """The states vLLM feeds; None where they depend on a verifier that is not known."""
        ids = self.top_ids
        if ids is None and not self.native:
            ids = _ids(self.nested, "layer_ids") if second_runner else self.nested_ids
        return self.default_states if ids is None else tuple(sorted(set(ids)))

    def vllm_count(self) -> int:
        """A as vLLM counts it."""
        config = self.layer if self.native else self.raw
        counts = [config.get("num_aux_hidden_states"), _length(self.nested_ids)]
        if self.kind == "qwen3":
            counts = [config.get("num_aux_layers"), counts[0], _length(self.top_ids), counts[1]]
        return next((count for count in counts if type(count) is int), 3)

    def sglang_count(self) -> int:
        """A as SGLang counts it."""
        counts = [self.raw.get("num_aux_hidden_states"), _length(self.nested_ids)]
        if self.kind == "mla":
            counts = [_length(self.nested_ids), _length(self.top_ids)]
        return next((count for count in counts if type(count) is int), 3)

    def sglang_states(self) -> States | None:
        """The states SGLang feeds; None where they depend on a verifier that is not known."""
        ids = self.nested_ids
        layers = None if self.verifier is None else self.verifier.num_hidden_layers
        return self.default_states if ids is None else sglang_states(ids, self.family, layers)


def facts_of(
    source: DrafterSource,
    weights: DrafterWeights,
    verifier: VerifierParts | None,
    map_sound: bool,
    embedding_differs: bool,
) -> Facts:
    """The facts of one checkpoint.

    Args:
        source: its config.
        weights: its tensors.
        verifier: what is known of the verifier.
        map_sound: whether d2t leads where it should.
        embedding_differs: whether its embedding was compared with the verifier's and is another one.
    """
    raw = source.raw
    native = source.format == "speculators"
    layer = raw.get("transformer_layer_config") if native else raw
    nested = raw.get("eagle_config")
    expected, names = expected_of(source).keys(), weights.entries.keys()
    fc = weights.entries.get("fc.weight")
    entries = [*weights.entries.values(), *weights.copies.values()]
    stored = {canonical_name(entry.stored_name) for entry in entries}
    further = range(1, source.config.num_hidden_layers)
    return Facts(
        source=source,
        raw=raw,
        native=native,
        kind=_kind(source),
        layer=layer if isinstance(layer, dict) else {},
        nested=nested if isinstance(nested, dict) else {},
        names=names,
        missing=tuple(sorted(expected - names)),
        unknown=tuple(sorted(names - expected)),
        prefixed=next((entry.stored_name for entry in entries if entry.stored_name.startswith("model.")), None),
        older=next((entry.stored_name for entry in entries if "aux_norm_" in entry.stored_name), None),
        hidden_norms=all(f"layers.{index}.hidden_norm.weight" in stored for index in further),
        input_norms=all(f"layers.{index}.input_layernorm.weight" in stored for index in further),
        map_sound=map_sound,
        fc_columns=fc.shape[1] if fc is not None and len(fc.shape) == 2 else None,
        embedding_differs=embedding_differs,
        verifier=None if verifier is None else verifier.config,
        family=_family(raw, None if verifier is None else verifier.config),
    )


def _kind(source: DrafterSource) -> Kind:
    if source.config.mla is not None:
        return "mla"
    if source.unjudged:
        return "other"
    return "qwen3" if source.config.qk_norm else "llama"


def _family(raw: Mapping[str, Any], verifier: VerifierConfig | None) -> str:
    if verifier is not None:
        return verifier.model_type or (verifier.architectures[0].lower() if verifier.architectures else "")
    section = raw.get("speculators_config")
    named = section.get("verifier") if isinstance(section, dict) else raw.get(KEPT_KEY)
    names = named.get("architectures") if isinstance(named, dict) else None
    return str(names[0]).lower() if isinstance(names, list) and names else ""


def _ids(config: Mapping[str, Any], key: str = _AUX_KEY) -> States | None:
    value = config.get(key)
    return tuple(value) if isinstance(value, list) and value and all(type(k) is int for k in value) else None


def _length(ids: States | None) -> int | None:
    return None if ids is None else len(ids)
