"""What is given for an EAGLE-3 drafter by mistake is named for what it is, with what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_core.checkpoint.convert import convert
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.drafter_files import describe_drafter
from eagle3_core.errors import CheckpointError, NotADrafter
from tests import makers
from tests.makers import H, V, random

EAGLE_3 = {
    **makers.VERIFIER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": makers.D,
}
LLAMA = makers.VERIFIER | {"num_hidden_layers": 1}
EAGLE_1_TENSORS = {"fc.weight": random(H, 2 * H), "layers.0.self_attn.q_proj.weight": random(H, H)}
MTP_TENSORS = {"model.layers.61.eh_proj.weight": random(H, 2 * H), "model.layers.61.enorm.weight": torch.ones(H)}
MEDUSA_TENSORS = {"0.0.linear.weight": random(H, H), "0.1.weight": random(V, H)}
ANY = {"fc.weight": random(H, 3 * H)}


@pytest.mark.parametrize(
    ("config", "tensors", "kind"),
    [
        (makers.VERIFIER, makers.verifier_tensors(), "a whole language model"),
        ({"model_type": "qwen3_vl", "text_config": {}}, ANY, "a whole language model"),
        (LLAMA, EAGLE_1_TENSORS, "an EAGLE-1 or EAGLE-2 head"),
        (LLAMA | {"architectures": ["EagleLlamaForCausalLM"]}, ANY, "an EAGLE-1 or EAGLE-2 head"),
        (LLAMA | {"architectures": ["LlamaForCausalLMEagle"]}, ANY, "an EAGLE-1 or EAGLE-2 head"),
        ({"speculators_model_type": "eagle"}, ANY, "an EAGLE-1 or EAGLE-2 head"),
        (EAGLE_3, EAGLE_1_TENSORS, "an EAGLE-1 or EAGLE-2 head"),
        ({"medusa_num_heads": 3}, MEDUSA_TENSORS, "Medusa heads"),
        ({"architectures": ["MedusaModel"]}, MEDUSA_TENSORS, "Medusa heads"),
        (EAGLE_3, MEDUSA_TENSORS, "Medusa heads"),
        ({"architectures": ["DeepSeekMTPModel"]}, ANY, r"a multi-token-prediction \(MTP\) head"),
        (EAGLE_3, MTP_TENSORS, r"a multi-token-prediction \(MTP\) head"),
        (EAGLE_3 | {"architectures": ["DFlashDraftModel"]}, ANY, "a DFlash drafter"),
        ({"speculators_model_type": "dflash"}, ANY, "a DFlash drafter"),
        ({"speculators_model_type": "dspark"}, ANY, "a DSpark drafter"),
        ({"speculators_model_type": "peagle"}, ANY, "a P-EAGLE drafter"),
        (EAGLE_3 | {"architectures": ["PEagleDraftModel"]}, ANY, "a P-EAGLE drafter"),
        (EAGLE_3, ANY | {"mask_hidden": random(1, H)}, "a P-EAGLE drafter"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, ANY, "an MLP speculator"),
        (EAGLE_3, {"base_model.model.q_proj.lora_A.weight": random(2, H)}, "a LoRA adapter: merge it"),
    ],
)
def test_it_is_named(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], kind: str) -> None:
    path = makers.write_config(tmp_path / "given", config)
    save_file(tensors, path / "model.safetensors")
    verdict = judge(path)
    assert verdict.verdict == "invalid"
    [named, *_] = [
        finding for finding in verdict.findings if finding.code == "other_model" and kind[:6] in finding.message
    ]
    assert named.hint.startswith("Give an EAGLE-3 drafter")
    with pytest.raises(CheckpointError, match=kind):
        convert(path, tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()


def test_an_adapter_without_its_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"base_model.model.q_proj.lora_A.weight": random(2, H)}, path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="a LoRA adapter: merge it into its model first"):
        convert(path, tmp_path / "out", "vllm")
    assert "other_model" in [finding.code for finding in judge(path).findings]


@pytest.mark.parametrize("name", ["Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "LlamaEagle3Model"])
def test_any_spelling_of_eagle_3_is_one(tmp_path: Path, name: str) -> None:
    assert describe_drafter(makers.write_config(tmp_path, EAGLE_3 | {"architectures": [name]})).config.hidden_size == H


def test_parallel_drafting_by_a_key_is_told(tmp_path: Path) -> None:
    path = makers.write_config(tmp_path, EAGLE_3 | {"eagle_config": {"parallel_draft_step": 4}})
    [told] = describe_drafter(path).unsupported
    assert told == "parallel_draft_step is 4, so it drafts all tokens at once (P-EAGLE), which vLLM alone computes"


def test_a_whole_model_is_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(NotADrafter, match="a whole language model, as a verifier is"):
        describe_drafter(makers.write_verifier(tmp_path / "verifier"))
