"""Verifiers of many families, tiny and random: what is captured, and that norm and head as read give their logits."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.errors import BadInput
from eagle3_core.training.setup import make_target_head
from eagle3_core.verifier.tensors import load_verifier_weights
from tests import tiny
from worker.hugging_face import HuggingFaceSession, backbone, capture_states, load_model
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
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "phi3": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "granite": {"logits_scaling": 4.0},
    "deepseek_v3": {
        "head_dim": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
WRAPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"sliding_window": 8}, {}),
    "qwen3_vl": (SECTIONS, {}),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", "head_dim": 8}),
}


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


@pytest.mark.parametrize("name", [*PLAIN, *WRAPPED])
def test_states_norm_and_head_of_a_family(tmp_path: Path, name: str) -> None:
    files = read_verifier_files(save_random(tmp_path / "verifier", config_of(name)))
    model = load_model(files.path, CPU, torch.float32)
    ids = torch.randint(3, V, (2, 20), generator=torch.Generator().manual_seed(1))
    wanted = (0, 2, 3, LAYERS)
    with torch.no_grad(), capture_states(model, wanted) as states:
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    for layer_id in wanted[:-1]:
        assert torch.equal(states[layer_id], output.hidden_states[layer_id])
    logits = make_target_head(load_verifier_weights(files), "pre_norm", CPU)(states[LAYERS])
    assert (logits - output.logits).abs().max() < 1e-5 * output.logits.abs().max()
    check_targets(files, states[LAYERS][:, -1], output.logits[:, -1])
    with pytest.raises(BadInput, match="wrong targets"):
        check_targets(files, states[3][:, -1], output.logits[:, -1])

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
