"""What keeps each server from serving a drafter right: one rule a row.

`when` looks at the facts and returns the particulars, or None where the rule does not apply. `effect`: the server
refuses to start; it loads and drafts wrongly; or (note) it depends on how it is started. `proof`: provoked on a real
server, or read in its source. Rules for SGLang rest on its source alone.
"""

from dataclasses import dataclass

from eagle3_core.checkpoint.findings import Effect, Proof, Server
from eagle3_core.checkpoint.serving_conditions import (
    Condition,
    beyond,
    disordered,
    dropped_by_sglang,
    dropped_by_vllm,
    first_runner,
    full_map,
    layer_type,
    local_verifier,
    lost,
    mla,
    native_gap,
    one_layer_early,
    other_count,
    reduced_without,
    rope_twice,
    said,
    second_runner,
    short_positions,
    stated,
    top_level_count,
    unknown_states,
    unknown_to_vllm,
    unregistered,
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


@dataclass(frozen=True)
class Rule:
    """One way in which a server fails a drafter."""

    code: str
    servers: tuple[Server, ...]
    effect: Effect
    proof: Proof
    source: str
    when: Condition
    fix: str


# fmt: off
RULES: tuple[Rule, ...] = (
    # every server
    Rule("missing_tensor", _ALL, "loads_wrongly", "provoked", "no server checks for missing names; fc left out on "
         "vLLM 0.32: acceptance length 1.56 -> 1.12", lost, "Restore the tensor, or take another epoch."),
    Rule("wrong_map", _ALL, "loads_wrongly", "provoked", "d2t is added to the draft index; absolute ids on vLLM 0.32: "
         "the first request fails and the engine is gone", full_map, "See the findings on d2t."),
    Rule("layer_order", _ALL, "loads_wrongly", "provoked", "vLLM interfaces.py, tuple(sorted(set(ids))); swapped on "
         "vLLM 0.32: 1.56 -> 1.05", disordered, "Sort the ids and the columns of fc alike."),
    Rule("rope_base_twice", _ALL, "loads_wrongly", "source", "transformers 5 modeling_rope_utils.py", rope_twice,
         "Write one base in both places."),
    Rule("further_layers", ("speculators", *_VLLM), "loads_wrongly", "source", "layers above 0 are normed by "
         "input_layernorm", said(lambda f: not f.input_norms, "more than one layer, without input_layernorm in each"),
         "Rename layers.i.hidden_norm to layers.i.input_layernorm for i > 0."),
    Rule("fc_bias", ("speculators",), "loads_wrongly", "source", "core.py: fc has no bias", said(
         lambda f: "fc_bias" in f.source.extras, "fc has a bias"), "It cannot be served."),
    Rule("fc_bias", _VLLM, "loads_wrongly", "provoked", "llama_eagle3.py: fc has none, and `bias` is read as that of "
         "attention; on vLLM 0.32: 1.00", said(lambda f: "fc_bias" in f.source.extras, "fc has a bias"),
         "It cannot be served."),
    # speculators
    Rule("foreign_format", ("speculators",), "refuses", "source", "speculators 0.9.0 config.py",
         said(lambda f: not f.native, "no speculators_config"), "Convert to the speculators format."),
    Rule("native_config", ("speculators", *_VLLM), "refuses", "source", "vLLM configs/speculators/base.py, "
         "speculators config.py", native_gap, "Write the key."),
    Rule("layer_type", ("speculators", *_VLLM), "refuses", "source", "vLLM algos.py: Unsupported model_type; "
         "speculators 0.9.0 knows llama and qwen3", layer_type, "Ship vLLM's HF style."),
    Rule("fc_width", ("speculators",), "refuses", "provoked", "from_pretrained with four ids and a 3H fc",
         other_count(top_level_count), "List as many ids as fc takes states."),
    Rule("head_replaced", ("speculators",), "loads_wrongly", "provoked", "from_pretrained without lm_head.weight takes "
         "the verifier's rows", reduced_without("lm_head.weight"), "Ship lm_head.weight."),
    Rule("part_dropped", ("speculators",), "loads_wrongly", "provoked", "from_pretrained drops what its flags do not "
         "ask for", said(lambda f: bool(f.unknown), "tensors without a flag are dropped"), "Set the flag."),
    Rule("other_width", ("speculators",), "refuses", "source", "core.py load_verifier_weights",
         lambda f: f"target_hidden_size {f.width}" if f.width != f.source.config.hidden_size else None,
         "It cannot be served from this format."),
    Rule("layer_beyond", ("speculators",), "refuses", "provoked", "ValueError since 0.9.0", beyond,
         "Ids go from 0 to the layers."),
    Rule("layer_beyond", (*_VLLM, "sglang"), "refuses", "source", "the loop over layers never gets there, and fc is "
         "given too few states", beyond, "Ids go from 0 to the layers."),
    Rule("layer_default", ("speculators",), "loads_wrongly", "provoked", "0.9.0 reads [2, N//2, N-3] where 0.3.0 wrote "
         "none and captured one layer later", said(one_layer_early, "written by speculators 0.3 without layer ids"),
         "Write [3, N//2+1, N-2]."),
    # vLLM
    Rule("unknown_tensor", _VLLM, "refuses", "provoked", "models/utils.py: no module or parameter named ...",
         unknown_to_vllm, "Remove or rename the tensor."),
    Rule("input_norm_dropped", _VLLM, "loads_wrongly", "provoked", "load_weights of llama_eagle3.py and "
         "qwen3_eagle3.py leaves it out without norm_before_fc", dropped_by_vllm, "Set the flag."),
    Rule("head_missing", _VLLM, "loads_wrongly", "provoked", "logits_processor.py cuts the verifier's logits to the "
         "first D; on vLLM 0.32: 1.00", reduced_without("lm_head.weight"), "Ship lm_head.weight."),
    Rule("map_missing", _VLLM, "loads_wrongly", "provoked", "draft ids stand for the first D tokens; on vLLM 0.32: "
         "1.00", reduced_without("d2t"), "Ship d2t."),
    Rule("layer_states", ("vllm-v1",), "loads_wrongly", "provoked", "gpu_model_runner.py: top level, else "
         "eagle_config; one up on vLLM 0.32: 1.56 -> 1.50", wrong_states(first_runner), _WRITE_STATES),
    Rule("layer_states", ("vllm-v2",), "loads_wrongly", "source", "eagle3_utils.py: top level, else "
         "eagle_config.layer_ids, else [2, N//2, N-3]", wrong_states(second_runner), _WRITE_STATES),
    Rule("layer_default", _VLLM, "loads_wrongly", "source", "takes [2, N//2, N-3] where there are no ids, one layer "
         "before what 0.3.0 captured", said(lambda f: one_layer_early(f) and f.verifier is None,
         "written by speculators 0.3 without layer ids"), "Write [3, N//2+1, N-2]."),
    Rule("layer_states_unknown", ("vllm-v1",), "note", "source", "gpu_model_runner.py", unknown_states(first_runner),
         _WRITE_STATES),
    Rule("layer_states_unknown", ("vllm-v2",), "note", "source", "eagle3_utils.py", unknown_states(second_runner),
         _WRITE_STATES),
    Rule("fc_width", _VLLM, "refuses", "provoked", "weight_loader asserts; ids at the top level are not counted",
         other_count(Facts.vllm_count), "Write num_aux_hidden_states."),
    Rule("flag_default", _VLLM, "loads_wrongly", "source", "algos.py reads true where speculators' class reads false; "
         "left out on vLLM 0.32: 1.38 -> 1.32", said(lambda f: f.native and "norm_before_residual" not in f.raw,
         "norm_before_residual is not stated"), "Write the flag."),
    Rule("aux_unused", (*_VLLM, "sglang"), "loads_wrongly", "source", "llama_eagle3.py of both makes no fc", said(
         lambda f: not mla(f) and f.nested.get("use_aux_hidden_state") is False,
         "eagle_config.use_aux_hidden_state is false"), "Write true."),
    Rule("activation", (*_VLLM, "sglang"), "refuses", "source", "llama.py of both: Only silu is supported for now",
         said(lambda f: f.source.config.hidden_act != "silu", "hidden_act is not silu"), "It cannot be served."),
    Rule("model_type", (*_VLLM, "sglang"), "refuses", "source", "transformers 5 configuration_auto.py: Unrecognized "
         "model", said(lambda f: not f.native and not f.raw.get("model_type"), "model_type is not stated"),
         "Write model_type."),
    Rule("quantised", _VLLM, "refuses", "source", "vllm#25883, #26590: looks for scales that are not there", said(
         lambda f: f.layer.get("quantization_config") is not None, "quantization_config beside plain tensors"),
         "Remove quantization_config."),
    Rule("native_type", _VLLM, "refuses", "provoked", "transformers_utils/config.py:361", said(
         lambda f: f.native and "model_type" in f.raw, "model_type beside speculators_config hides the format"),
         "Remove model_type."),
    Rule("local_verifier", _VLLM, "note", "source", "config.py maybe_override_with_speculators: `vllm serve DIR` needs "
         "a hub id", local_verifier, "Start with --model and --speculative-config, or write the hub id."),
    Rule("architecture", _VLLM, "refuses", "provoked", "registry.py:698, configs/eagle.py", unregistered,
         "Write a registered architecture."),
    Rule("null_width", _VLLM, "refuses", "provoked", "llama_eagle3.py multiplies it", stated("target_hidden_size"),
         "Leave target_hidden_size out."),
    Rule("mla_type", _VLLM, "refuses", "source", "hf_config_override rewrites it to deepseek_mtp", said(
         lambda f: mla(f) and f.layer.get("model_type") in ("deepseek_v3", "deepseek_v32"),
         "model_type deepseek_v3 becomes an unregistered class"), "Write model_type deepseek_v2."),
    Rule("mla_list", _VLLM, "note", "source", "vllm#45760, open", said(
         lambda f: mla(f) and f.layer.get("model_type") == "kimi_k2", "kimi_k2 is not listed as latent attention"),
         "Write model_type deepseek_v2."),
    Rule("mla_norm", _VLLM, "refuses", "source", "deepseek_eagle3.py has no input_norm",
         said(lambda f: mla(f) and f.source.config.norm_before_fc, "norm_before_fc with latent attention"),
         "It cannot be served."),
    Rule("mla_norm", ("sglang",), "loads_wrongly", "source", "norm_before_fc is read by llama_eagle3.py only",
         said(lambda f: mla(f) and f.source.config.norm_before_fc, "norm_before_fc with latent attention"),
         "It cannot be served."),
    Rule("positions", _VLLM, "note", "source", "speculative.py:1806: an error for plain rope, a cap for yarn",
         short_positions, "Raise max_position_embeddings, or serve with a smaller --max-model-len."),
    Rule("pipeline", _VLLM, "note", "source", "no relay of aux states in DeepSeek V2/V3 and Kimi K2/K2.5", said(
         lambda f: f.family.startswith(("deepseek", "kimi")), "pipeline parallel cannot be used"),
         "Serve with tensor parallel."),
    # SGLang
    Rule("speculators_format", ("sglang",), "refuses", "source", "no reader of the speculators format", said(
         lambda f: f.native, "sizes are in transformer_layer_config"), "Convert to SGLang's style."),
    Rule("architecture", ("sglang",), "refuses", "source", "EntryClass of llama_eagle3.py and kimi_k25_eagle3.py",
         lambda f: f"architecture {f.architecture or 'not stated'}"
         if not f.native and f.architecture not in _SGLANG_CLASSES else None,
         "Write LlamaForCausalLMEagle3 or Eagle3DeepseekV2ForCausalLM."),
    Rule("qwen3_norms", ("sglang",), "loads_wrongly", "source", "no q_norm and k_norm in its drafter", said(
         lambda f: f.kind == "qwen3", "a qwen3 drafter"), "It cannot be served."),
    Rule("residual_norm", ("sglang",), "loads_wrongly", "source", "norm_before_residual exists in neither class", said(
         lambda f: f.source.config.norm_before_residual, "norm_before_residual is true"), "It cannot be served."),
    Rule("unknown_tensor", ("sglang",), "loads_wrongly", "source", "load_weights drops names it does not know",
         dropped_by_sglang, "Set the flag, rename or remove the tensor."),
    Rule("head_missing", ("sglang",), "loads_wrongly", "source", "sglang#27829: stays random, 1.00", said(
         lambda f: "lm_head.weight" not in f.names and f.raw.get("draft_vocab_size") is not None, "no lm_head.weight"),
         "Ship lm_head.weight."),
    Rule("map_missing", ("sglang",), "loads_wrongly", "source", "hot_token_id stays unset", reduced_without("d2t"),
         "Ship d2t."),
    Rule("vocabulary_key", ("sglang",), "refuses", "source", "llama_eagle3.py reads config.draft_vocab_size", said(
         lambda f: not f.native and not mla(f) and "draft_vocab_size" not in f.raw, "no draft_vocab_size"),
         "Write draft_vocab_size."),
    Rule("tied_head", ("sglang",), "loads_wrongly", "source", "lm_head = embed_tokens", said(
         lambda f: f.source.tied, "tie_word_embeddings is true"), "Write false."),
    Rule("embedding_replaced", ("sglang",), "loads_wrongly", "source", "set_embed in eagle_worker_v2.py:336", said(
         lambda f: f.width == f.source.config.hidden_size
         and (f.embedding_differs or f.source.config.own_embedding), "its embedding is not the verifier's"),
         "It cannot be served."),
    Rule("bias_dropped", ("sglang",), "loads_wrongly", "source", "q/k/v have no bias", said(
         lambda f: f.source.config.attention_bias, "attention_bias is true"), "It cannot be served."),
    Rule("further_layers", ("sglang",), "loads_wrongly", "source", "layers above 0 are normed by hidden_norm", said(
         lambda f: not mla(f) and not f.hidden_norms, "more than one layer, without hidden_norm in each"),
         "Rename layers.i.input_layernorm to layers.i.hidden_norm for i > 0."),
    Rule("mlp_bias", ("sglang",), "loads_wrongly", "source", "gate, up and down have no bias", said(
         lambda f: "mlp_bias" in f.source.extras, "mlp_bias is true"), "It cannot be served."),
    Rule("window", ("sglang",), "note", "source", "sliding_window is not among the keys its drafter reads", said(
         lambda f: f.source.config.sliding_window is not None, "its sliding window is not kept: rows further back are "
         "seen than in training"), "Serve contexts up to the window, or train without one."),
    Rule("mla_layers", ("sglang",), "refuses", "source", "EAGLE3 currently only supports 1 layer", said(
         lambda f: mla(f) and f.source.config.num_hidden_layers != 1, "more than one layer"), "It cannot be served."),
    Rule("null_width", ("sglang",), "refuses", "source", "llama_eagle3.py", lambda f: None if mla(f) else stated(
         "target_hidden_size")(f), "Leave target_hidden_size out."),
    Rule("layer_states", ("sglang",), "loads_wrongly", "source", "only eagle_config is read; shifted by the verifier's "
         "family (sglang PR#25454)", wrong_states(Facts.sglang_states), "Write outputs of layers into eagle_config."),
    Rule("layer_states_unknown", ("sglang",), "note", "source", "spec_aux_hidden_state.py",
         unknown_states(Facts.sglang_states), "Write outputs of layers into eagle_config."),
    Rule("fc_width", ("sglang",), "refuses", "source", "eagle_utils.py:245", lambda f: None if f.native else
         other_count(Facts.sglang_count)(f), "Write num_aux_hidden_states."),
    Rule("positions", ("sglang",), "note", "source", "model_config.py:1291: an error unless "
         "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1", short_positions, "Raise max_position_embeddings."),
)
"""In the order they are looked at."""
# fmt: on
