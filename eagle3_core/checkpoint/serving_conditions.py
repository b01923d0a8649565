"""The conditions of the servers' rules: each looks at the facts and returns the particulars, or None.

D draft vocabulary, A aux states.
"""

from collections.abc import Callable

from eagle3_core.checkpoint.layer_ids import States
from eagle3_core.checkpoint.serving_facts import Facts, Kind
from eagle3_core.contract.drafter_files import FLAGS

Condition = Callable[[Facts], str | None]

_BORROWED = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
_VLLM_CLASSES: dict[str, Kind] = {
    "Eagle3LlamaForCausalLM": "llama",
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3DeepseekV2ForCausalLM": "mla",
    "Eagle3DeepseekV3ForCausalLM": "mla",
}
"""What vLLM makes EAGLE-3 drafters of, and the layers each has."""

_PACKED = ("awq", "gptq", "bitsandbytes", "gguf")
"""Quantisations whose tensors have other names than plain ones."""

_QWEN3_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32}
"""What transformers' Qwen3Config takes for what is not stated; other kinds take what follows from the other sizes."""


def lost(facts: Facts) -> str | None:
    """Tensors that every server needs from the file."""
    lost = [name for name in facts.missing if name not in _BORROWED]
    return f"{', '.join(lost[:4])}{' ...' if len(lost) > 4 else ''} missing: random or zero weights" if lost else None


def unknown_to_vllm(facts: Facts) -> str | None:
    """Names vLLM has no module for."""
    unknown = [name for name in facts.unknown if name not in ("t2d", *_dropped(facts)) and "mask_hidden" not in name]
    if facts.source.config.fc_norm and not vllm_flag(facts, "fc_norm"):
        unknown.append("fc_norm.0.weight")
    if not facts.reduced and "d2t" in facts.names:
        unknown = ["d2t", *(name for name in unknown if name != "d2t")]
    if facts.older is not None:
        unknown.append(facts.older)
    if facts.prefixed is not None:
        unknown.append(f"{facts.prefixed} (it puts model. in front itself)")
    return f"it has no place for {', '.join(unknown[:3])}" if unknown else None


def norm_dropped_by_vllm(facts: Facts) -> str | None:
    """The one norm that vLLM passes over where its flag is not set; of others it knows nothing, and says so."""
    if "input_norm.weight" in _dropped(facts):
        return "input_norm.weight is dropped, as norm_before_fc is not true"
    return None


def biases_dropped_by_vllm(facts: Facts) -> str | None:
    """Biases that vLLM has no place for, which it passes over whatever they belong to."""
    dropped = [name for name in _dropped(facts) if name.endswith(".bias")]
    if facts.kind == "qwen3":
        dropped += [name for name in sorted(facts.names) if name.endswith("o_proj.bias") and name not in dropped]
    return f"{', '.join(dropped[:3])} dropped" if dropped else None


def _dropped(facts: Facts) -> list[str]:
    return [
        name
        for name in facts.unknown
        if name.endswith(".bias") or (name == "input_norm.weight" and facts.kind != "mla")
    ]


def dropped_by_sglang(facts: Facts) -> str | None:
    """Names SGLang passes over."""
    unknown = [name for name in facts.unknown if name not in ("t2d", "d2t")]
    if facts.kind == "mla" and facts.prefixed is not None:
        unknown.append(facts.prefixed)
    return f"{', '.join(unknown[:3])} dropped" if unknown else None


def reduced_without(name: str) -> Condition:
    """Whether a tensor that a reduced vocabulary needs is missing."""

    def when(facts: Facts) -> str | None:
        if not facts.reduced or name in facts.names:
            return None
        config = facts.source.config
        return f"no {name}, though draft_vocab_size {config.draft_vocab_size} is below vocab_size {config.vocab_size}"

    return when


def wrong_states(served: Callable[[Facts], States | None]) -> Condition:
    """Whether the states a server feeds are others than those the drafter learned from."""

    def when(facts: Facts) -> str | None:
        trained, fed = facts.trained_states, served(facts)
        if trained is None or fed is None or fed == trained:
            return None
        return f"it feeds states {list(fed)}, the drafter was trained on {list(trained)}"

    return when


def unknown_states(served: Callable[[Facts], States | None]) -> Condition:
    """Whether it cannot be told which states a server feeds, or which the drafter was trained on."""

    def when(facts: Facts) -> str | None:
        if facts.trained_states is not None and served(facts) is not None:
            return None
        if facts.native and one_layer_early(facts):
            return None  # whatever the verifier, they are others: told by another rule
        if facts.trained_states is None:
            return "the checkpoint does not say which states it was trained on"
        return "which states it feeds depends on the verifier, which is not given"

    return when


def other_count(count: Callable[[Facts], int]) -> Condition:
    """Whether a server counts another number of aux states than fc takes."""

    def when(facts: Facts) -> str | None:
        expected = count(facts) * facts.width
        if facts.fc_columns is None or facts.fc_columns == expected:
            return None
        return f"it makes fc {expected} wide ({count(facts)} states), the file's has {facts.fc_columns} columns"

    return when


def short_positions(facts: Facts) -> str | None:
    """Whether the drafter states fewer positions than its verifier."""
    stated = None if facts.verifier is None else facts.verifier.number("max_position_embeddings")
    own = facts.source.config.max_position_embeddings
    return f"max_position_embeddings {own}, the verifier's is {stated}" if stated is not None and own < stated else None


def unregistered(facts: Facts) -> str | None:
    """Whether vLLM knows the class that `architectures` becomes."""
    if facts.native:
        return None
    if not facts.architecture:
        return "architectures names no class"
    name = _vllm_class(facts)
    return None if name in _VLLM_CLASSES else f"architecture {name} is not registered"


def other_layers(facts: Facts) -> str | None:
    """Whether the class that `architectures` becomes has other layers than the drafter."""
    kind = _VLLM_CLASSES.get(_vllm_class(facts), facts.kind)
    if facts.native or facts.kind == "other" or kind == facts.kind:
        return None
    return f"architecture {facts.architecture} has layers of {kind}, the drafter's are of {facts.kind}"


def _vllm_class(facts: Facts) -> str:
    name = facts.architecture
    return name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"


def vllm_flag(facts: Facts, flag: str) -> bool:
    """A norm flag as vLLM reads it."""
    if flag == "norm_before_fc" and not facts.native and flag in facts.nested:
        return facts.nested[flag] is True
    default = facts.native and flag == "norm_before_residual"
    return facts.raw.get(flag, default) is True


def sglang_flag(facts: Facts, flag: str) -> bool:
    """A norm flag as SGLang reads it; norm_before_residual it has none."""
    if flag in ("fc_norm", "norm_output"):
        return facts.raw.get(flag) is True or (flag == "fc_norm" and facts.raw.get("use_aux_norm") is True)
    return bool(getattr(facts.source.config, flag))


def flag_elsewhere(read: Callable[[Facts, str], bool]) -> Condition:
    """Whether a norm flag stands where a server does not look; one that stands nowhere is told by other rules."""

    def when(facts: Facts) -> str | None:
        names = _elsewhere(facts, read)
        return f"{', '.join(names)} in eagle_config is not read" if names else None

    return when


def _elsewhere(facts: Facts, read: Callable[[Facts, str], bool]) -> list[str]:
    return [
        flag for flag in FLAGS if facts.nested.get(flag) is not None and facts.nested[flag] is not read(facts, flag)
    ]


def quantised(packed: bool) -> Condition:
    """Whether a quantization_config lies beside plain tensors, of a kind that packs tensors or of one that does not."""

    def when(facts: Facts) -> str | None:
        found = facts.layer.get("quantization_config") or facts.raw.get("quantization_config")
        if not isinstance(found, dict):
            return None
        method, form = found.get("quant_method"), str(found.get("format", ""))
        if (method in _PACKED or "pack" in form) is not packed:
            return None
        return f"quantization_config ({method}) beside plain tensors"

    return when


def sizes_by_default(facts: Facts) -> str | None:
    """Whether a size that is not stated is taken to be another than the tensors have."""
    if facts.kind != "qwen3":
        return None
    config = facts.source.config
    taken = [
        f"{key} is not stated and taken for {default}"
        for key, default in _QWEN3_DEFAULTS.items()
        if key not in facts.layer and getattr(config, key) != default
    ]
    return "; ".join(taken) or None


def window_without_types(facts: Facts) -> str | None:
    """Whether nothing tells vLLM that the drafter's window slides."""
    if facts.source.config.sliding_window is None or isinstance(facts.layer.get("layer_types"), list):
        return None
    if facts.kind == "qwen3" and facts.layer.get("max_window_layers") == 0:
        return None
    return "sliding_window without layer_types: every row is seen"


def native_type_missing(facts: Facts) -> str | None:
    """What a config in the speculators format is known by, and it lacks."""
    keys = [key for key in ("speculators_model_type", "speculators_config") if facts.raw.get(key) is None]
    return f"{keys[0]} is missing" if facts.native and keys else None


def native_gap(facts: Facts) -> str | None:
    """What `vllm serve DIR` needs of a config in the speculators format, and it lacks."""
    if not facts.native:
        return None
    section = facts.raw.get("speculators_config")
    section = section if isinstance(section, dict) else {}
    methods, verifier = section.get("proposal_methods"), section.get("verifier")
    first = methods[0] if isinstance(methods, list) and methods else None
    if not isinstance(first, dict) or type(first.get("speculative_tokens")) is not int:
        return "speculators_config.proposal_methods[0].speculative_tokens is missing"
    named = isinstance(verifier, dict) and isinstance(verifier.get("name_or_path"), str)
    return None if named else "speculators_config.verifier.name_or_path is missing"


def local_verifier(facts: Facts) -> str | None:
    """Whether the verifier is named by a path."""
    name = facts.source.verifier_name
    if not facts.native or name is None:
        return None
    local = name.startswith(("/", ".", "~")) or name.count("/") != 1
    return f"speculators_config.verifier.name_or_path {name!r} is no hub id" if local else None


def rope_twice(facts: Facts) -> str | None:
    """Whether the rope base stands in both layouts with different values."""
    new, old = facts.layer.get("rope_parameters"), facts.layer.get("rope_theta")
    inner = new.get("rope_theta") if isinstance(new, dict) else None
    if inner is None or old is None or inner == old:
        return None
    return f"rope_parameters.rope_theta is {inner}, rope_theta {old}: transformers 5 reads the one, 4 the other"


def one_layer_early(facts: Facts) -> bool:
    """Whether servers feed the states one layer before those that speculators 0.3 captured."""
    return facts.source.captured_after and facts.top_ids is None


def beyond(facts: Facts) -> str | None:
    """Whether layer ids go beyond the verifier's last layer."""
    highest = max(facts.trained_states or (0,))
    layers = None if facts.verifier is None else facts.verifier.num_hidden_layers
    return f"layer ids reach {highest}, the verifier has {layers} layers" if layers and highest > layers else None


def disordered(facts: Facts) -> str | None:
    """Whether layer ids do not ascend or name a layer twice."""
    ids = facts.trained_states
    if ids is None or list(ids) == sorted(set(ids)):
        return None
    return f"layer ids {list(ids)}: states are joined in ascending order, each once"


def layer_type(facts: Facts) -> str | None:
    """Whether the speculators format holds layers that its readers do not know."""
    kind = facts.layer.get("model_type", "llama")
    return f"model_type {kind!r}" if facts.native and kind not in ("llama", "qwen3") else None


def full_map(facts: Facts) -> str | None:
    """Whether d2t was found wrong."""
    return None if facts.map_sound or "d2t" not in facts.names else "d2t leads to other tokens than it should"


def stated(key: str, value: object = None) -> Condition:
    """Whether a key of the flat config is there with this value."""

    def when(facts: Facts) -> str | None:
        there = not facts.native and key in facts.raw and facts.raw[key] == value
        return f"{key} is {'null' if value is None else value}" if there else None

    return when


def said(test: Callable[[Facts], bool], text: str) -> Condition:
    """A test and what to say of it."""
    return lambda facts: text if test(facts) else None


def mla(facts: Facts) -> bool:
    """Whether its attention is latent."""
    return facts.kind == "mla"


def top_level_count(facts: Facts) -> int:
    """A as speculators counts it."""
    return 3 if facts.top_ids is None else len(facts.top_ids)


def first_runner(facts: Facts) -> States | None:
    """The states vLLM's V1 model runner feeds."""
    return facts.vllm_states(second_runner=False)


def second_runner(facts: Facts) -> States | None:
    """The states vLLM's V2 model runner feeds."""
    return facts.vllm_states(second_runner=True)
