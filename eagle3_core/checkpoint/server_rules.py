"""What keeps each server from serving a drafter right: one rule a row.

`when` looks at the facts and returns the particulars, or None where the rule does not apply. `effect`: the server
refuses to start; it loads and drafts wrongly, or ends at the first request; or (note) it depends on how it is started.
`provoked`: the servers it was seen on; of the others it was read in their source. Rules for SGLang rest on its source
alone. vLLM's were provoked on 0.32, on both of its model runners; tests/serving/cases.py holds what was served.
"""

from dataclasses import dataclass

from eagle3_core.checkpoint.findings import Effect, Server
from eagle3_core.checkpoint.serving_conditions import (
    Condition,
    beyond,
    biases_dropped_by_vllm,
    disordered,
    dropped_by_sglang,
    first_runner,
    flag_elsewhere,
    full_map,
    layer_type,
    local_verifier,
    lost,
    mla,
    native_gap,
    native_type_missing,
    norm_dropped_by_vllm,
    one_layer_early,
    other_count,
    other_layers,
    quantised,
    reduced_without,
    rope_twice,
    said,
    second_runner,
    sglang_flag,
    short_positions,
    sizes_by_default,
    stated,
    top_level_count,
    unknown_states,
    unknown_to_vllm,
    unregistered,
    vllm_flag,
    window_without_types,
    wrong_states,
)
from eagle3_core.checkpoint.serving_facts import Facts

VERSIONS: dict[Server, str] = {
    "speculators": "speculators 0.9.0, Eagle3DraftModel.from_pretrained",
    "vllm-v1": "vLLM 0.33.0, V1 model runner",
    "vllm-v2": "vLLM 0.33.0, V2 model runner",
    "sglang": "SGLang 0.5.23",
}
"""What the rules speak of."""

_WRITE_STATES = "Write the states at the top level."
_VLLM: tuple[Server, ...] = ("vllm-v1", "vllm-v2")
_ALL: tuple[Server, ...] = ("speculators", *_VLLM, "sglang")
_SGLANG_CLASSES = frozenset({"LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"})


def _without_fc(facts: Facts) -> bool:
    return not mla(facts) and facts.nested.get("use_aux_hidden_state") is False


@dataclass(frozen=True)
class Rule:
    """One way in which a server fails a drafter."""

    code: str
    servers: tuple[Server, ...]
    effect: Effect
    provoked: tuple[Server, ...]
    source: str
    when: Condition
    fix: str


# fmt: off
RULES: tuple[Rule, ...] = (
    # every server
    Rule("missing_tensor", _ALL, "loads_wrongly", _VLLM, "no server checks for missing names; fc left out on vLLM "
         "0.32: acceptance length 1.38 -> 1.14", lost, "Restore the tensor, or take another epoch."),
    Rule("wrong_map", _ALL, "loads_wrongly", _VLLM, "d2t is added to the draft index; absolute ids on vLLM 0.32: "
         "the first request fails and the engine is gone", full_map, "See the findings on d2t."),
    Rule("layer_order", _ALL, "loads_wrongly", _VLLM, "vLLM interfaces.py, tuple(sorted(set(ids))); swapped on "
         "vLLM 0.32: 1.56 -> 1.05", disordered, "Sort the ids and the columns of fc alike."),
    Rule("rope_base_twice", ("speculators", "sglang"), "loads_wrongly", (), "transformers 5 modeling_rope_utils.py",
         rope_twice, "Write one base in both places."),
    Rule("rope_base_twice", _VLLM, "note", _VLLM, "takes the base in rope_parameters", rope_twice,
         "Write one base in both places."),
    Rule("further_layers", ("speculators", *_VLLM), "loads_wrongly", _VLLM, "layers above 0 are normed by "
         "input_layernorm", said(lambda f: not f.input_norms, "more than one layer, without input_layernorm in each"),
         "Rename layers.i.hidden_norm to layers.i.input_layernorm for i > 0."),
    Rule("fc_bias", ("speculators",), "loads_wrongly", (), "core.py: fc has no bias", said(
         lambda f: "fc_bias" in f.source.extras, "fc has a bias"), "It cannot be served."),
    Rule("fc_bias", _VLLM, "loads_wrongly", _VLLM, "llama_eagle3.py: fc has none, it is dropped, and `bias` is "
         "read as that of attention; on vLLM 0.32: 1.00", said(lambda f: "fc_bias" in f.source.extras, "fc has a bias"),
         "It cannot be served."),
    # speculators
    Rule("foreign_format", ("speculators",), "refuses", (), "speculators 0.9.0 config.py",
         said(lambda f: not f.native, "no speculators_config"), "Convert to the speculators format."),
    Rule("native_key", ("speculators", *_VLLM), "refuses", _VLLM, "vLLM config.py:361, algos.py: Expected one of ...",
         native_type_missing, "Write the key."),
    Rule("native_config", ("speculators",), "refuses", (), "speculators config.py", native_gap, "Write the key."),
    Rule("native_config", _VLLM, "note", _VLLM, "configs/speculators/base.py: `vllm serve DIR` refuses it, --model "
         "with --speculative-config does not look", native_gap, "Write the key."),
    Rule("layer_type", ("speculators", *_VLLM), "refuses", _VLLM, "vLLM algos.py: Unsupported model_type; "
         "speculators 0.9.0 knows llama and qwen3", layer_type, "Ship vLLM's HF style."),
    Rule("fc_width", ("speculators",), "refuses", ("speculators",), "from_pretrained with four ids and a 3H fc",
         other_count(top_level_count), "List as many ids as fc takes states."),
    Rule("head_replaced", ("speculators",), "loads_wrongly", ("speculators",), "from_pretrained without lm_head.weight "
         "takes the verifier's rows", reduced_without("lm_head.weight"), "Ship lm_head.weight."),
    Rule("part_dropped", ("speculators",), "loads_wrongly", ("speculators",), "from_pretrained drops what its flags do "
         "not ask for", said(lambda f: bool(f.unknown), "tensors without a flag are dropped"), "Set the flag."),
    Rule("other_width", ("speculators",), "refuses", (), "core.py load_verifier_weights",
         lambda f: f"target_hidden_size {f.width}" if f.width != f.source.config.hidden_size else None,
         "It cannot be served from this format."),
    Rule("layer_beyond", ("speculators",), "refuses", ("speculators",), "ValueError since 0.9.0", beyond,
         "Ids go from 0 to the layers."),
    Rule("layer_beyond", _VLLM, "loads_wrongly", _VLLM, "the loop over layers never gets there; the first request "
         "fails in fc and the engine is gone", beyond, "Ids go from 0 to the layers."),
    Rule("layer_beyond", ("sglang",), "refuses", (), "the loop over layers never gets there, and fc is given too few "
         "states", beyond, "Ids go from 0 to the layers."),
    Rule("layer_default", ("speculators",), "loads_wrongly", ("speculators",), "0.9.0 reads [2, N//2, N-3] where 0.3.0 "
         "wrote none and captured one layer later", said(one_layer_early, "written by speculators 0.3 without layer "
         "ids"), "Write [3, N//2+1, N-2]."),
    # vLLM
    Rule("unknown_tensor", _VLLM, "refuses", _VLLM, "models/utils.py: no module or parameter named ...",
         unknown_to_vllm, "Remove or rename the tensor."),
    Rule("input_norm_dropped", _VLLM, "loads_wrongly", _VLLM, "load_weights of llama_eagle3.py and "
         "qwen3_eagle3.py leaves it out without norm_before_fc", norm_dropped_by_vllm, "Set the flag."),
    Rule("bias_dropped", _VLLM, "loads_wrongly", _VLLM, "models/utils.py passes over every bias it has no place for; "
         "o_proj of qwen3.py has none", biases_dropped_by_vllm, "Set its flag; o_proj's cannot be served."),
    Rule("head_missing", _VLLM, "loads_wrongly", _VLLM, "logits_processor.py cuts the verifier's logits to the "
         "first D; on vLLM 0.32: 1.00", reduced_without("lm_head.weight"), "Ship lm_head.weight."),
    Rule("map_missing", _VLLM, "loads_wrongly", _VLLM, "draft ids stand for the first D tokens; on vLLM 0.32: "
         "1.00", reduced_without("d2t"), "Ship d2t."),
    Rule("layer_states", ("vllm-v1",), "loads_wrongly", ("vllm-v1",), "gpu_model_runner.py: top level, else "
         "eagle_config; one up on vLLM 0.32: 1.56 -> 1.50", wrong_states(first_runner), _WRITE_STATES),
    Rule("layer_states", ("vllm-v2",), "loads_wrongly", ("vllm-v2",), "eagle3_utils.py: top level, else "
         "eagle_config.layer_ids, else [2, N//2, N-3]", wrong_states(second_runner), _WRITE_STATES),
    Rule("layer_default", _VLLM, "loads_wrongly", _VLLM, "takes [2, N//2, N-3] where there are no ids, one layer "
         "before what 0.3.0 captured", said(lambda f: one_layer_early(f) and f.verifier is None,
         "written by speculators 0.3 without layer ids"), "Write [3, N//2+1, N-2]."),
    Rule("layer_states_unknown", ("vllm-v1",), "note", ("vllm-v1",), "gpu_model_runner.py",
         unknown_states(first_runner), _WRITE_STATES),
    Rule("layer_states_unknown", ("vllm-v2",), "note", ("vllm-v2",), "eagle3_utils.py", unknown_states(second_runner),
         _WRITE_STATES),
    Rule("fc_width", _VLLM, "refuses", _VLLM, "weight_loader asserts; ids at the top level are not counted",
         other_count(Facts.vllm_count), "Write num_aux_hidden_states."),
    Rule("flag_default", _VLLM, "loads_wrongly", _VLLM, "algos.py reads true where speculators' class reads false; "
         "left out on vLLM 0.32: 1.38 -> 1.32", said(lambda f: f.native and "norm_before_residual" not in f.raw,
         "norm_before_residual is not stated"), "Write the flag."),
    Rule("flag_place", _VLLM, "loads_wrongly", _VLLM, "llama_eagle3.py looks for norm_before_fc alone in eagle_config; "
         "algos.py not even for that", flag_elsewhere(vllm_flag), "Write the flag at the top."),
    Rule("aux_unused", _VLLM, "loads_wrongly", _VLLM, "llama_eagle3.py makes no fc: V1 drafts from the last state, "
         "V2's engine ends at the first request", said(_without_fc, "eagle_config.use_aux_hidden_state is false"),
         "Write true."),
    Rule("aux_unused", ("sglang",), "loads_wrongly", (), "llama_eagle3.py makes no fc", said(_without_fc,
         "eagle_config.use_aux_hidden_state is false"), "Write true."),
    Rule("activation", (*_VLLM, "sglang"), "refuses", _VLLM, "llama.py of both: Only silu is supported for now",
         said(lambda f: f.source.config.hidden_act != "silu", "hidden_act is not silu"), "It cannot be served."),
    Rule("model_type", (*_VLLM, "sglang"), "refuses", _VLLM, "transformers 5 configuration_auto.py: Unrecognized "
         "model", said(lambda f: not f.native and not f.raw.get("model_type"), "model_type is not stated"),
         "Write model_type."),
    Rule("quantised", _VLLM, "refuses", _VLLM, "looks for packed tensors: no module or parameter named 'fc.weight'",
         quantised(packed=True), "Remove quantization_config."),
    Rule("quantised_silently", _VLLM, "loads_wrongly", _VLLM, "casts plain tensors to eight bits and lacks the scales; "
         "int8 of compressed-tensors on vLLM 0.32: no draft token the same", quantised(packed=False),
         "Remove quantization_config."),
    Rule("window", _VLLM, "note", _VLLM, "its window moves on along the chain: of its rows the second draft token sees "
         "one less than in training, and so on", said(lambda f: f.source.config.sliding_window is not None,
         "its window moves on while it drafts"), "Serve contexts up to the window, or train without one."),
    Rule("window_types", _VLLM, "loads_wrongly", _VLLM, "llama.py and qwen3_eagle3.py read layer_types; transformers' "
         "Qwen3Config makes none that slide below max_window_layers", window_without_types,
         'Write layer_types, "sliding_attention" for each layer.'),
    Rule("native_type", _VLLM, "refuses", _VLLM, "transformers_utils/config.py:361", said(
         lambda f: f.native and "model_type" in f.raw, "model_type beside speculators_config hides the format"),
         "Remove model_type."),
    Rule("local_verifier", _VLLM, "note", (), "config.py maybe_override_with_speculators: `vllm serve DIR` needs a hub "
         "id (0.32 takes a path as well)", local_verifier, "Start with --model and --speculative-config, or write the "
         "hub id."),
    Rule("architecture", _VLLM, "refuses", _VLLM, "registry.py:698, configs/eagle.py", unregistered,
         "Write a registered architecture."),
    Rule("other_layers", _VLLM, "refuses", _VLLM, "the class has no place for norms of queries and keys, or of "
         "latents", other_layers, "Write the architecture of the drafter's layers."),
    Rule("size_default", _VLLM, "refuses", _VLLM, "transformers 5 Qwen3Config", sizes_by_default, "Write the size."),
    Rule("null_width", _VLLM, "refuses", _VLLM, "llama_eagle3.py multiplies it", stated("target_hidden_size"),
         "Leave target_hidden_size out."),
    Rule("mla_type", _VLLM, "refuses", _VLLM, "hf_config_override rewrites it to deepseek_mtp", said(
         lambda f: mla(f) and f.layer.get("model_type") in ("deepseek_v3", "deepseek_v32"),
         "model_type deepseek_v3 becomes an unregistered class"), "Write model_type deepseek_v2."),
    Rule("mla_list", _VLLM, "note", (), "vllm#45760, open", said(
         lambda f: mla(f) and f.layer.get("model_type") == "kimi_k2", "kimi_k2 is not listed as latent attention"),
         "Write model_type deepseek_v2."),
    Rule("mla_norm", _VLLM, "refuses", _VLLM, "deepseek_eagle3.py has no input_norm",
         said(lambda f: mla(f) and f.source.config.norm_before_fc, "norm_before_fc with latent attention"),
         "It cannot be served."),
    Rule("mla_norm", ("sglang",), "loads_wrongly", (), "norm_before_fc is read by llama_eagle3.py only",
         said(lambda f: mla(f) and f.source.config.norm_before_fc, "norm_before_fc with latent attention"),
         "It cannot be served."),
    Rule("positions", _VLLM, "note", _VLLM, "beyond them V1 of 0.32 drafts nothing, and V2 at random where rope "
         "is yarn; 0.33 (speculative.py:1806) caps the server there", short_positions,
         "Raise max_position_embeddings, or serve with a smaller --max-model-len."),
    Rule("pipeline", _VLLM, "note", (), "no relay of aux states in DeepSeek V2/V3 and Kimi K2/K2.5", said(
         lambda f: f.family.startswith(("deepseek", "kimi")), "pipeline parallel cannot be used"),
         "Serve with tensor parallel."),
    # SGLang
    Rule("speculators_format", ("sglang",), "refuses", (), "no reader of the speculators format", said(
         lambda f: f.native, "sizes are in transformer_layer_config"), "Convert to SGLang's style."),
    Rule("architecture", ("sglang",), "refuses", (), "EntryClass of llama_eagle3.py and kimi_k25_eagle3.py",
         lambda f: f"architecture {f.architecture or 'not stated'}"
         if not f.native and f.architecture not in _SGLANG_CLASSES else None,
         "Write LlamaForCausalLMEagle3 or Eagle3DeepseekV2ForCausalLM."),
    Rule("qwen3_norms", ("sglang",), "loads_wrongly", (), "no q_norm and k_norm in its drafter", said(
         lambda f: f.kind == "qwen3", "a qwen3 drafter"), "It cannot be served."),
    Rule("residual_norm", ("sglang",), "loads_wrongly", (), "norm_before_residual exists in neither class", said(
         lambda f: f.source.config.norm_before_residual, "norm_before_residual is true"), "It cannot be served."),
    Rule("unknown_tensor", ("sglang",), "loads_wrongly", (), "load_weights drops names it does not know",
         dropped_by_sglang, "Set the flag, rename or remove the tensor."),
    Rule("flag_place", ("sglang",), "loads_wrongly", (), "llama_eagle3.py reads fc_norm and norm_output at the top "
         "alone", flag_elsewhere(sglang_flag), "Write the flag at the top."),
    Rule("head_missing", ("sglang",), "loads_wrongly", (), "sglang#27829: stays random, 1.00", said(
         lambda f: "lm_head.weight" not in f.names and f.raw.get("draft_vocab_size") is not None, "no lm_head.weight"),
         "Ship lm_head.weight."),
    Rule("map_missing", ("sglang",), "loads_wrongly", (), "hot_token_id stays unset", reduced_without("d2t"),
         "Ship d2t."),
    Rule("vocabulary_key", ("sglang",), "refuses", (), "llama_eagle3.py reads config.draft_vocab_size", said(
         lambda f: not f.native and not mla(f) and "draft_vocab_size" not in f.raw, "no draft_vocab_size"),
         "Write draft_vocab_size."),
    Rule("tied_head", ("sglang",), "loads_wrongly", (), "lm_head = embed_tokens", said(
         lambda f: f.source.tied, "tie_word_embeddings is true"), "Write false."),
    Rule("embedding_replaced", ("sglang",), "loads_wrongly", (), "set_embed in eagle_worker_v2.py:336", said(
         lambda f: f.width == f.source.config.hidden_size
         and (f.embedding_differs or f.source.config.own_embedding), "its embedding is not the verifier's"),
         "It cannot be served."),
    Rule("bias_dropped", ("sglang",), "loads_wrongly", (), "q/k/v have no bias", said(
         lambda f: f.source.config.attention_bias, "attention_bias is true"), "It cannot be served."),
    Rule("further_layers", ("sglang",), "loads_wrongly", (), "layers above 0 are normed by hidden_norm", said(
         lambda f: not mla(f) and not f.hidden_norms, "more than one layer, without hidden_norm in each"),
         "Rename layers.i.input_layernorm to layers.i.hidden_norm for i > 0."),
    Rule("mlp_bias", ("sglang",), "loads_wrongly", (), "gate, up and down have no bias", said(
         lambda f: "mlp_bias" in f.source.extras, "mlp_bias is true"), "It cannot be served."),
    Rule("window", ("sglang",), "note", (), "sliding_window is not among the keys its drafter reads", said(
         lambda f: f.source.config.sliding_window is not None, "its sliding window is not kept: rows further back are "
         "seen than in training"), "Serve contexts up to the window, or train without one."),
    Rule("mla_layers", ("sglang",), "refuses", (), "EAGLE3 currently only supports 1 layer", said(
         lambda f: mla(f) and f.source.config.num_hidden_layers != 1, "more than one layer"), "It cannot be served."),
    Rule("null_width", ("sglang",), "refuses", (), "llama_eagle3.py", lambda f: None if mla(f) else stated(
         "target_hidden_size")(f), "Leave target_hidden_size out."),
    Rule("layer_states", ("sglang",), "loads_wrongly", (), "only eagle_config is read; shifted by the verifier's "
         "family (sglang PR#25454)", wrong_states(Facts.sglang_states), "Write outputs of layers into eagle_config."),
    Rule("layer_states_unknown", ("sglang",), "note", (), "spec_aux_hidden_state.py",
         unknown_states(Facts.sglang_states), "Write outputs of layers into eagle_config."),
    Rule("fc_width", ("sglang",), "refuses", (), "eagle_utils.py:245", lambda f: None if f.native else
         other_count(Facts.sglang_count)(f), "Write num_aux_hidden_states."),
    Rule("positions", ("sglang",), "note", (), "model_config.py:1291: an error unless "
         "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1", short_positions, "Raise max_position_embeddings."),
)
"""In the order they are looked at."""
# fmt: on
