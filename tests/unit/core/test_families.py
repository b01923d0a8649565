"""Verifiers of many families, tiny and random: what is captured, and that norm and head as read give their logits."""

import dataclasses
import importlib
import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.families import FAMILIES
from eagle3_core.contract.params import ExtractParams
from eagle3_core.contract.tensor_names import FINAL_NORM
from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.errors import BadInput
from eagle3_core.training.setup import make_target_head
from eagle3_core.verifier.tensors import load_verifier_weights
from tests import tiny
from tests.prepared import write_prepared
from worker.context import StageContext
from worker.hugging_face import HuggingFaceSession, backbone, capture_states, load_model
from worker.stages import extract
from worker.stages.extract import check_targets

CPU = torch.device("cpu")
LAYERS, V = 6, 96
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
EYES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "depth": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [1],
}
LATENT = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "gemma": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "final_logit_softcapping": 5.0},
    "phi3": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "hyperclovax": {"logits_scaling": 4.0},
    "minicpm3": LATENT | {"dim_model_base": 8},
    "falcon_h1": {
        "lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
    },
    "lfm2": {},
    "deepseek_v2": LATENT | EXPERTS,
    "deepseek_v3": LATENT | EXPERTS | {"rope_parameters": YARN},
    "glm": {},
    "glm4": {},
    "glm4_moe": EXPERTS,
    "glm4_moe_lite": LATENT | EXPERTS,
    "kimi_linear": LATENT | EXPERTS | {"linear_head_dim": 8, "linear_num_heads": 2},
}  # fmt: skip
WRAPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"sliding_window": 8}, {}),
    "qwen3_vl": (SECTIONS, {}),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", "head_dim": 8}),
    "kimi_k25": ({"model_type": "deepseek_v3", **PLAIN["deepseek_v3"]}, {"pos_emb_height": 4, "pos_emb_width": 4}),
}
AUX = (0, 2, 3)


def save_random(directory: Path, config: Any) -> Path:
    """A model of the config with weights that make every norm and every head count."""
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    family = transformers.AutoModelForCausalLM if known else transformers.AutoModelForImageTextToText
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = family.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
                else:
                    parameter.normal_(std=0.15)
        model.save_pretrained(directory)
    return directory


def config_of(name: str) -> Any:
    if name in PLAIN:
        return transformers.AutoConfig.for_model(name, **{**SIZES, **PLAIN[name]})
    text, vision = WRAPPED[name]
    return transformers.AutoConfig.for_model(
        name, text_config={**SIZES, **text}, vision_config={**EYES, **vision}, tie_word_embeddings=False
    )


def as_published(directory: Path, kind: str) -> Path:
    """Rewrite a verifier as Moonshot AI publishes its kind: names of layers, model_type, and code of its own."""
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    text["model_type"] = "kimi_k2"
    config["auto_map"] = {
        "AutoConfig": f"configuration_{kind}.Config",
        "AutoModelForCausalLM": f"modeling_{kind}.Model",
    }
    for name in (f"configuration_{kind}.py", f"modeling_{kind}.py"):
        (directory / name).write_text("raise RuntimeError('this code was run')\n")
    (directory / "config.json").write_text(json.dumps(config))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    layers = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensors[name] for name in tensors
    }
    save_file(layers, file, metadata={"format": "pt"})
    return directory


def make(directory: Path, name: str) -> Path:
    if name == "kimi_k2":
        return as_published(save_random(directory, config_of("deepseek_v3")), "deepseek")
    made = save_random(directory, config_of(name))
    return as_published(made, "kimi_k25") if name == "kimi_k25" else made


def extracted(root: Path, verifier: Path, rows: list[torch.Tensor]) -> HiddenStateStore:
    """What the extract stage makes of these rows, in float32."""
    tiny.make_tokenizer(verifier)
    output = root / "store"
    output.mkdir()
    everything = [(ids, torch.ones(len(ids), dtype=torch.bool)) for ids in rows]
    prepared = write_prepared(root / "prepared", verifier, everything)
    params = ExtractParams(
        verifier=str(verifier),
        prepared_dir=str(prepared),
        aux_layer_ids=AUX,
        dtype="float32",
        store_dtype="float32",
        device="cpu",
    )
    events = EventWriter(root / "events.jsonl")
    try:
        extract.run(StageContext("job", params, output, events, root / "control"))
    finally:
        events.close()
    return HiddenStateStore(output)


@pytest.mark.parametrize("name", [*PLAIN, *WRAPPED, "kimi_k2"])
def test_the_logits_of_a_family_come_back_from_its_stored_states(tmp_path: Path, name: str) -> None:
    verifier = make(tmp_path / "verifier", name)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, V, (length,), generator=generator) for length in (20, 13)]
    store = extracted(tmp_path, verifier, rows)
    model = load_model(verifier, CPU, torch.float32)
    files = read_verifier_files(verifier)
    assert "unknown_family" not in dict(files.warnings)
    head = make_target_head(load_verifier_weights(files), store.meta.last_state, CPU)
    for number, ids in enumerate(rows):
        with torch.no_grad():
            plain = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        row = store.read(number)
        for slot, layer_id in enumerate(AUX):
            torch.testing.assert_close(row.aux_TAH[:, slot], plain.hidden_states[layer_id][0], rtol=1e-4, atol=1e-5)
        off = (head(row.last_TH) - plain.logits[0]).abs().max()
        assert off < 1e-5 * max(1.0, float(plain.logits.abs().max()))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "glm4", "qwen3_vl"])
def test_a_session_gives_greedy_tokens_and_states(tmp_path: Path, name: str) -> None:
    model = load_model(make(tmp_path / "verifier", name), CPU, torch.float32)
    ids = torch.randint(3, V, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), capture_states(model, (1, 2, 3)) as states:
        session = HuggingFaceSession(model, (1, 2, 3), states)
        session.extend(ids[0].tolist())
        session.extend([5, 6, 7])
        session.rewind(2)
        greedy, aux = session.extend([9, 10])
        plain = model(
            input_ids=torch.tensor([[*ids[0].tolist(), 5, 9, 10]]), output_hidden_states=True, use_cache=False
        )
    assert greedy == plain.logits[0, -2:].argmax(-1).tolist()
    assert torch.allclose(aux[:, 1], plain.hidden_states[2][0, -2:], atol=1e-5)


def test_targets_made_in_another_way_are_noticed(tmp_path: Path) -> None:
    config = config_of("gemma2")
    config.final_logit_softcapping = 5.0
    files = read_verifier_files(save_random(tmp_path / "verifier", config))
    model = load_model(files.path, CPU, torch.float32)
    ids = torch.randint(3, V, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), capture_states(model, (3, LAYERS)) as states:
        logits = model(input_ids=ids, use_cache=False).logits
    check_targets(files, states[LAYERS][:, -1], logits[:, -1])
    for changes in (
        {"norm_gain_offset": 0.0},
        {"final_logit_softcapping": None},
        {"rms_norm_eps": 1.0},
        {"logit_scale": 1.01},
    ):
        with pytest.raises(BadInput, match=r"model_type 'gemma2' .* wrong targets"):
            check_targets(dataclasses.replace(files, **changes), states[LAYERS][:, -1], logits[:, -1])
    with pytest.raises(BadInput, match="wrong targets"):
        check_targets(files, states[3][:, -1], logits[:, -1])
    logits[1, -1, 7] = torch.nan
    with pytest.raises(
        BadInput, match=r"NaN or Inf for 1 tokens, the first is token 7, .*model.embed_tokens.weight or"
    ):
        check_targets(files, states[LAYERS][:, -1], logits[:, -1])


class UnknownConfig(transformers.LlamaConfig):
    model_type = "unknown_kind"


class UnknownModel(transformers.LlamaForCausalLM):
    """Multiplies its logits, and no key of its config says so."""

    config_class = UnknownConfig
    factor = 1.0

    def forward(self, **given: Any) -> Any:
        output = super().forward(**given)
        output.logits = output.logits * self.factor
        return output


def test_a_family_nobody_knows_is_compared_and_refused_where_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers.AutoConfig.register("unknown_kind", UnknownConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(UnknownConfig, UnknownModel, exist_ok=True)
    verifier = save_random(tmp_path / "verifier", UnknownConfig(**SIZES))
    assert "unknown_family" in dict(read_verifier_files(verifier).warnings)
    (tmp_path / "right").mkdir()
    assert len(extracted(tmp_path / "right", verifier, [torch.tensor([3, 4, 5])])) == 1
    monkeypatch.setattr(UnknownModel, "factor", 3.0)
    (tmp_path / "wrong").mkdir()
    with pytest.raises(BadInput, match=r"do not give the logits of the verifier itself, they are 67% off"):
        extracted(tmp_path / "wrong", verifier, [torch.tensor([3, 4, 5])])
    assert not list((tmp_path / "wrong" / "store").iterdir())


def test_several_residual_streams_are_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("hy_v4", **{**SIZES, **LATENT, **EXPERTS})
    model = load_model(save_random(tmp_path / "verifier", config), CPU, torch.float32)
    with pytest.raises(BadInput, match="several residual streams"), capture_states(model, (2,)):
        model(input_ids=torch.tensor([[3, 4]]))


REMOTE_OR_PART = {"minicpm", "kimi_k2"}
"""Of the table: lies beside its weights, or is built as another."""


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - REMOTE_OR_PART))
def test_a_row_of_the_table_says_what_its_class_assumes(kind: str) -> None:
    config = _default_config(kind)
    family = FAMILIES[kind]
    tied = getattr(config, "tie_word_embeddings", None)
    assert family.tied in (tied, None)
    if not family.layer_norm:
        eps = next(
            getattr(config, key) for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if hasattr(config, key)
        )
        assert family.eps == eps
    for key, _ in family.scale:
        assert hasattr(config, key)
    cap = getattr(config, family.softcap or "final_logit_softcapping", None)
    assert family.default_softcap == cap
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("full_attention", rope).get("rope_theta")
    if theta is not None:
        assert family.rope_theta == theta
    assert (family.layer_norm, family.gain_offset) == _final_norm(config)


def _final_norm(config: Any) -> tuple[bool, float]:
    """Whether a family's final norm is a LayerNorm, and what it adds to its weight, by the source of its class."""
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    named = rf"self\.(?:{'|'.join(FINAL_NORM.leaves)}) = (\w*RMSNorm)\((?:config|text_config)\.hidden_size"
    classes = {getattr(module, name) for name in re.findall(named, inspect.getsource(module))}
    adds = {"1.0 + self.weight" in inspect.getsource(norm) for norm in classes}
    assert len(adds) <= 1, classes
    return not adds, float(adds == {True})


def _default_config(kind: str) -> Any:
    """The config its class makes of nothing."""
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind in mapping:
        return mapping[kind]().get_text_config()
    wrapper = next(name for name in mapping if kind.startswith(f"{name}_"))
    return mapping[wrapper]().get_text_config()


def test_the_decoder_is_found_beside_a_vision_tower(tmp_path: Path) -> None:
    model = load_model(save_random(tmp_path / "verifier", config_of("mistral3")), CPU, torch.float32)
    assert type(backbone(model)).__name__ == "MistralModel"


def test_a_layer_norm_without_a_bias_is_refused_by_its_family(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("cohere2", **SIZES)
    with pytest.raises(BadInput, match=r"model_type 'cohere2' has a LayerNorm"):
        read_verifier_files(save_random(tmp_path / "verifier", config))


def test_a_hybrid_verifier_is_not_decoded(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("qwen3_5_text", **SIZES)
    model = load_model(save_random(tmp_path / "verifier", config), CPU, torch.float32)
    with pytest.raises(BadInput, match="layers of the kind linear_attention"):
        HuggingFaceSession(model, (1, 2, 3), {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.3.mlp.up_proj.weight"), "1 tensors .*layers.3.mlp.up_proj.weight is missing"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(3, 3)}), r"is \[3, 3\], not \[64, 32\]"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_verifier_with_a_hole_is_not_filled_with_random_numbers(tmp_path: Path, change: Any, said: str) -> None:
    verifier = tiny.make_verifier(tmp_path / "verifier")
    tensors = tiny.verifier_tensors()
    change(tensors)
    save_file(tensors, verifier / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=said):
        load_model(verifier, CPU, torch.float32)


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "modelopt"}}])
def test_codes_are_never_taken_for_weights(tmp_path: Path, config: dict[str, Any]) -> None:
    verifier = tiny.make_verifier(tmp_path / "verifier", **config)
    tensors = tiny.verifier_tensors()
    name = "model.layers.3.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.ones(())
    tensors["mtp.layers.0.mlp.up_proj.weight"] = tensors[name].clone()
    tensors["mtp.layers.0.mlp.up_proj.weight_scale"] = torch.ones(())
    save_file(tensors, verifier / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=f"{name}_scale was not used: {name} is quantised"):
        load_model(verifier, CPU, torch.float32)


def test_a_package_that_a_quantised_verifier_needs_is_named(tmp_path: Path) -> None:
    scheme = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(BadInput, match=r"the worker's environment lacks what this verifier needs: .*optimum"):
        load_model(tiny.make_verifier(tmp_path / "verifier", quantization_config=scheme), CPU, torch.float32)
