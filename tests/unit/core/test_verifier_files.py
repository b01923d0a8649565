"""Reading verifiers: where their tensors lie, what their configs mean, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.contract.verifier_files import (
    VerifierFiles,
    config_fingerprint,
    read_verifier_files,
    tokenizer_fingerprint,
)
from eagle3_core.errors import BadInput, UnreadableFile
from eagle3_core.verifier.tensors import load_rows, load_tensor, load_verifier_weights, tensor_chunks
from tests.makers import (
    VERIFIER,
    H,
    V,
    random,
    verifier_tensors,
    write_config,
    write_kimi_like,
    write_shards,
    write_verifier,
)

NESTED = {key: value for key, value in VERIFIER.items() if key != "architectures"}


def refused(path: Path, *words: str) -> str:
    with pytest.raises(BadInput) as caught:
        read_verifier_files(path)
    text = str(caught.value)
    assert all(word in text for word in words), text
    return text


def codes(files: VerifierFiles) -> list[str]:
    return [code for code, _ in files.warnings]


# ---------------------------------------------------------------- where the tensors are


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    files = read_verifier_files(write_verifier(tmp_path))
    assert (files.embedding.name, files.head.name, files.final_norm.name) == (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
    )
    assert (files.vocab_size, files.hidden_size, files.head_dim, files.num_key_value_heads) == (V, H, 4, 2)
    assert (files.rms_norm_eps, files.max_position_embeddings, files.tied) == (1e-5, 512, False)
    assert files.rope == {"rope_type": "default", "rope_theta": 500000.0}
    assert files.warnings == []
    assert str(files.head) == "lm_head.weight model.safetensors [64, 16] BF16"


def test_the_kimi_layout_is_read_from_its_shards(tmp_path: Path) -> None:
    files = read_verifier_files(write_kimi_like(tmp_path))
    assert files.architectures == ("KimiK25ForConditionalGeneration",)
    assert files.model_type == "kimi_k2"
    assert files.embedding.name == "language_model.model.embed_tokens.weight"
    assert files.embedding.file.name == "model-00001-of-00006.safetensors"
    assert files.head.name == "language_model.lm_head.weight"
    assert files.head.file.name == "model-00006-of-00006.safetensors"
    assert files.final_norm.name == "language_model.model.norm.weight"
    assert files.head_dim == 8, "v_head_dim"
    assert files.rope["rope_type"] == "yarn"
    assert files.rope["rope_theta"] == 50000.0
    assert codes(files) == ["mla_head_dim"]


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "model.lm_head.weight"),
        ("language_model.", "lm_head.weight"),
        ("thinker.model.", "thinker.lm_head.weight"),
        ("model.text_model.", "lm_head.weight"),
        ("llm.model.", "llm.lm_head.weight"),
        ("module.model.", "module.lm_head.weight"),
        ("model.llm.model.", "model.llm.lm_head.weight"),
        ("", "lm_head.weight"),
    ],
)
def test_wrappers_in_any_spelling(tmp_path: Path, prefix: str, head: str) -> None:
    tensors = verifier_tensors(prefix, head) | {"model.visual.patch_embed.proj.weight": random(8, 3)}
    files = read_verifier_files(write_verifier(tmp_path, tensors, {"model_type": "x_vl", "text_config": NESTED}))
    assert files.embedding.name == f"{prefix}embed_tokens.weight"
    assert files.head.name == head
    assert files.final_norm.name == f"{prefix}norm.weight"
    assert files.hidden_size == H


def test_other_leaf_names(tmp_path: Path) -> None:
    tensors = {"tok_embeddings.weight": random(V, H), "norm.weight": torch.ones(H), "output.weight": random(V, H)}
    files = read_verifier_files(write_verifier(tmp_path, tensors))
    assert (files.embedding.name, files.head.name) == ("tok_embeddings.weight", "output.weight")


def test_a_suffix_alone_never_wins(tmp_path: Path) -> None:
    traps = {
        "model.mtp.embed_tokens.weight": random(V, H, seed=9),
        "model.layers.61.embed_tokens.weight": random(V, H, seed=9),
        "model.layers.61.shared_head.norm.weight": torch.ones(H),
        "model.layers.61.shared_head.lm_head.weight": random(V, H, seed=9),
        "model.layers.0.self_attn.q_norm.weight": torch.ones(4),
        "model.layers.0.post_norm.weight": torch.ones(H),
        "model.vision_tower.norm.weight": torch.ones(H),
        "model.embed_tokens_per_layer.weight": random(V, H),
        "talker.model.embed_tokens.weight": random(V, H),
    }
    files = read_verifier_files(write_verifier(tmp_path, traps | verifier_tensors("model.language_model.")))
    assert files.embedding.name == "model.language_model.embed_tokens.weight"
    assert files.final_norm.name == "model.language_model.norm.weight"
    assert files.head.name == "lm_head.weight"


def test_the_plain_name_comes_before_a_wrapper(tmp_path: Path) -> None:
    tensors = verifier_tensors() | {"language_model.model.embed_tokens.weight": random(V, H, seed=5)}
    assert read_verifier_files(write_verifier(tmp_path, tensors)).embedding.name == "model.embed_tokens.weight"


def test_two_candidates_without_a_rule_are_listed(tmp_path: Path) -> None:
    tensors = verifier_tensors("language_model.model.") | verifier_tensors("model.language_model.")
    refused(
        write_verifier(tmp_path, tensors),
        "language_model.model.embed_tokens",
        "model.language_model.embed_tokens",
        "no rule",
    )


def test_the_near_names_are_listed_when_nothing_fits(tmp_path: Path) -> None:
    tensors = {"model.mtp.embed_tokens.weight": random(V, H), "lm_head.weight": random(V, H)}
    refused(write_verifier(tmp_path, tensors), "no embedding found", "near names", "model.mtp.embed_tokens.weight")
    tensors = {"a.b.c": random(V, H)}
    refused(write_verifier(tmp_path, tensors), "no name comes near")


# ---------------------------------------------------------------- files and index


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    write_kimi_like(tmp_path)
    for number in (2, 5):
        (tmp_path / f"model-{number:05}-of-00006.safetensors").unlink()
    refused(tmp_path, "2 of 6", "model-00002-of-00006.safetensors", "model-00005-of-00006.safetensors")


def test_a_stale_index_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, VERIFIER)
    weight_map = write_shards(tmp_path, [verifier_tensors()])
    weight_map["model.layers.9.gone.weight"] = "model-00001-of-00001.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, "stale index", "model.layers.9.gone.weight")


def test_stray_files_beside_an_index_are_warned_about(tmp_path: Path) -> None:
    write_config(tmp_path, VERIFIER)
    write_shards(tmp_path, [verifier_tensors()])
    save_file({"model.embed_tokens.weight": torch.zeros(V, 8, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    files = read_verifier_files(tmp_path)
    assert files.embedding.file.name == "model-00001-of-00001.safetensors"
    assert codes(files) == ["unlisted_weight_file"]
    assert "model.safetensors not listed" in files.warnings[0][1]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 1}}', "not a file name"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "outside the directory"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "outside the directory"),
        ('{"weight_map": {"a": "b"}, "weight_map": {}}', "twice"),
        ("", "empty file"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: str, words: str) -> None:
    write_verifier(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refused(tmp_path, "model.safetensors.index.json", words)


def test_shards_without_an_index(tmp_path: Path) -> None:
    write_kimi_like(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "no_index" in codes(read_verifier_files(tmp_path))
    (tmp_path / "model-00003-of-00006.safetensors").unlink()
    refused(tmp_path, "1 of 6 shards missing", "model-00003-of-00006.safetensors")


def test_no_weights_at_all(tmp_path: Path) -> None:
    write_config(tmp_path, VERIFIER)
    refused(tmp_path, "no weights", "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "pickles")
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "m.gguf").write_bytes(b"x")
    refused(tmp_path, "m.gguf")
    refused(tmp_path / "absent", "no such directory")
    refused(tmp_path / "config.json", "not a directory")


def test_an_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    write_verifier(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UnreadableFile, match="LFS pointer"):
        read_verifier_files(tmp_path)


# ---------------------------------------------------------------- tied and untied heads


def test_a_tied_verifier_uses_its_embedding(tmp_path: Path) -> None:
    files = read_verifier_files(write_verifier(tmp_path, verifier_tensors(head=None), tie_word_embeddings=True))
    assert files.tied
    assert files.head == files.embedding


@pytest.mark.parametrize(("flag", "said"), [(False, "tie_word_embeddings: false"), (None, "does not say")])
def test_no_head_and_not_tied(tmp_path: Path, flag: bool | None, said: str) -> None:
    path = write_verifier(tmp_path, verifier_tensors(head=None), tie_word_embeddings=flag)
    refused(path, "lm_head.weight is not in", "model.safetensors", said)


def test_families_that_tie_without_saying_so(tmp_path: Path) -> None:
    path = write_verifier(tmp_path, verifier_tensors(head=None), tie_word_embeddings=None, model_type="gemma2")
    assert read_verifier_files(path).tied


def test_a_stored_copy_of_a_tied_head_is_no_matter(tmp_path: Path) -> None:
    tensors = verifier_tensors(head=None)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    files = read_verifier_files(write_verifier(tmp_path, tensors, tie_word_embeddings=True))
    assert files.tied
    assert files.warnings == []


def test_a_stored_head_that_differs_is_warned_about(tmp_path: Path) -> None:
    files = read_verifier_files(write_verifier(tmp_path, tie_word_embeddings=True))
    assert files.head.name == "model.embed_tokens.weight"
    (code, message), *_ = files.warnings
    assert code == "tied_head_differs"
    assert "lm_head.weight" in message
    assert "model.embed_tokens.weight is used" in message


# ---------------------------------------------------------------- quantised tensors


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (
            {"lm_head.weight_packed": torch.zeros(V, 2, dtype=torch.int32), "lm_head.weight_scale": random(V, 1)},
            "packed",
        ),
        ({"lm_head.weight": torch.zeros(V, 8, dtype=torch.uint8), "lm_head.weight_scale_2": torch.ones(1)}, "FP4"),
        ({"lm_head.weight": torch.zeros(V, H).to(torch.float8_e4m3fn), "lm_head.weight_scale": random(V, 1)}, "FP8"),
        (
            {"lm_head.weight": torch.zeros(V, H).to(torch.float8_e4m3fn), "lm_head.weight_scale_inv": random(1, 1)},
            "FP8",
        ),
        ({"lm_head.weight": torch.zeros(V, H, dtype=torch.int8), "lm_head.SCB": torch.ones(V)}, "bitsandbytes"),
        ({"lm_head.qweight": torch.zeros(2, V, dtype=torch.int32), "lm_head.scales": random(1, V)}, "GPTQ"),
        ({"lm_head.weight": torch.zeros(V, H, dtype=torch.int8)}, "I8"),
        (
            {"lm_head.weight_blocks": torch.zeros(V, 8, dtype=torch.uint8), "lm_head.weight_scales": random(V, 1)},
            "MXFP4",
        ),
        ({"lm_head.W_q": torch.zeros(V, 8, dtype=torch.uint8), "lm_head.scale": random(V, 1)}, "HQQ"),
        ({"lm_head.weight._data": torch.zeros(V, H, dtype=torch.int8), "lm_head.weight._scale": random(V)}, "quanto"),
        ({"lm_head.weight": torch.zeros(V, 2, dtype=torch.uint32), "lm_head.scales": random(V, 1)}, "U32"),
        ({"lm_head.weight": random(V, H), "lm_head.weight_scale": random(V, 1)}, "scale"),
    ],
)
def test_a_quantised_head_is_refused(tmp_path: Path, extra: dict[str, torch.Tensor], named: str) -> None:
    path = write_verifier(tmp_path, verifier_tensors(head=None) | extra)
    refused(path, "quantised head not supported", "lm_head.", named)


def test_a_quantised_embedding_is_refused(tmp_path: Path) -> None:
    tensors = verifier_tensors() | {"model.embed_tokens.weight": torch.zeros(V, H, dtype=torch.int8)}
    refused(write_verifier(tmp_path, tensors), "quantised embedding not supported", "I8")


# ---------------------------------------------------------------- shapes and sizes


def test_padding_rows_are_allowed_and_missing_rows_are_not(tmp_path: Path) -> None:
    files = read_verifier_files(write_verifier(tmp_path / "padded", vocab_size=V - 4))
    assert codes(files) == ["padded_vocabulary", "padded_vocabulary"]
    assert load_verifier_weights(files).head.shape == (V - 4, H)
    refused(write_verifier(tmp_path / "short", vocab_size=V + 1), "model.embed_tokens.weight", "64 rows", "65")


def test_sizes_that_contradict_the_tensors(tmp_path: Path) -> None:
    refused(write_verifier(tmp_path / "a", hidden_size=H * 2), "model.embed_tokens.weight", "hidden_size")
    tensors = verifier_tensors() | {"model.norm.weight": torch.ones(H + 1)}
    refused(write_verifier(tmp_path / "b", tensors), "model.norm.weight", "[17]")
    tensors = verifier_tensors() | {"model.norm.bias": torch.zeros(H)}
    refused(write_verifier(tmp_path / "c", tensors), "LayerNorm")


@pytest.mark.parametrize(("stated", "rows", "found"), [(8, 32, 8), (None, 16, 4), (4, 16, 4)])
def test_head_dim(tmp_path: Path, stated: int | None, rows: int, found: int) -> None:
    tensors = verifier_tensors() | {"model.layers.0.self_attn.q_proj.weight": random(rows, H)}
    assert read_verifier_files(write_verifier(tmp_path, tensors, head_dim=stated)).head_dim == found


@pytest.mark.parametrize(("stated", "rows"), [(8, 16), (None, 32), (4, 32)])
def test_head_dim_against_q_proj(tmp_path: Path, stated: int | None, rows: int) -> None:
    tensors = verifier_tensors() | {"model.layers.0.self_attn.q_proj.weight": random(rows, H)}
    refused(
        write_verifier(tmp_path, tensors, head_dim=stated),
        "model.layers.0.self_attn.q_proj.weight",
        "head_dim",
        str(rows),
    )


def test_a_gated_q_proj_holds_twice_the_rows(tmp_path: Path) -> None:
    tensors = verifier_tensors() | {"model.layers.0.self_attn.q_proj.weight": random(64, H)}
    files = read_verifier_files(write_verifier(tmp_path, tensors, head_dim=8, model_type="qwen3_next"))
    assert (files.head_dim, files.norm_gain_offset) == (8, 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers is '8'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "head_dim is not stated"),
        ({"num_key_value_heads": 3}, "is no multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"is_encoder_decoder": True}, "only decoders can be verifiers"),
        ({"draft_vocab_size": 24}, "is the config of a drafter"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"architectures": "Llama"}, "architectures"),
    ],
)
def test_nonsense_in_the_config_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    refused(write_verifier(tmp_path, **changes), "config.json", words)


def test_a_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    refused(write_verifier(tmp_path, {**verifier_tensors(), "lm_head.bias": random(V)}), "lm_head.bias", "with a bias")


@pytest.mark.parametrize(("stated", "further", "warned"), [(8, None, []), (6, 2, []), (6, None, ["layers_left_out"])])
def test_layers_behind_the_last_one_that_is_stated(
    tmp_path: Path, stated: int, further: int | None, warned: list[str]
) -> None:
    tensors = {**verifier_tensors(), "model.layers.7.mlp.up_proj.weight": random(4, H)}
    changes = {"num_hidden_layers": stated, "num_nextn_predict_layers": further}
    assert codes(read_verifier_files(write_verifier(tmp_path, tensors, **changes))) == warned


def test_an_adapter_is_no_part_of_the_verifier(tmp_path: Path) -> None:
    lora = {"model.layers.0.self_attn.q_proj.lora_A.weight": random(2, H)}
    assert codes(read_verifier_files(write_verifier(tmp_path / "a", verifier_tensors() | lora))) == [
        "adapter_not_merged"
    ]
    path = write_verifier(tmp_path / "b")
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    refused(path, "holds a LoRA adapter alone")
    wrapped = {"lm_head.base_layer.weight" if n == "lm_head.weight" else n: t for n, t in verifier_tensors().items()}
    refused(write_verifier(tmp_path / "c", wrapped), "near names: lm_head.base_layer.weight")


def test_a_verifier_in_a_cache_of_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in write_verifier(tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../../blobs/{file.name}")
    assert read_verifier_files(snapshot).warnings == []
    refused(tmp_path / "models--a--b", "give the snapshot itself", str(snapshot))
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "blobs" / name).unlink()
        with pytest.raises((BadInput, UnreadableFile), match=f"{name}: leads to a file that is not there"):
            read_verifier_files(snapshot)


def test_experts_without_a_dense_mlp(tmp_path: Path) -> None:
    path = write_verifier(tmp_path, intermediate_size=None, moe_intermediate_size=12, num_experts_per_tok=2)
    files = read_verifier_files(path)
    assert files.intermediate_size == 24
    assert codes(files) == ["intermediate_size_absent"]


def test_every_eos_id_counts(tmp_path: Path) -> None:
    path = write_verifier(tmp_path, eos_token_id=[2, 5], bos_token_id=None)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    files = read_verifier_files(path)
    assert (files.bos_token_id, files.eos_token_ids) == (None, (2, 5, 9))
    (path / "generation_config.json").write_text(f'{{"eos_token_id": {V}}}')
    files = read_verifier_files(path)
    assert (files.eos_token_ids, codes(files)) == ((2, 5, V), ["eos_outside_vocabulary"])


@pytest.mark.parametrize(
    ("changes", "gain", "scale", "cap"),
    [
        ({"model_type": "llama"}, 0.0, 1.0, None),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, 1.0, 1.0, 30.0),
        ({"model_type": "gemma3_text"}, 1.0, 1.0, None),
        ({"model_type": "qwen3_5_moe_text"}, 1.0, 1.0, None),
        ({"model_type": "gemma3n_text"}, 0.0, 1.0, 30.0),
        ({"model_type": "granite", "logits_scaling": 8.0}, 0.0, 0.125, None),
        ({"model_type": "new_kind", "logit_scale": 0.0625}, 0.0, 0.0625, None),
        ({"model_type": "llama", "logit_scale": 0.0625, "final_logit_softcapping": 30.0}, 0.0, 1.0, None),
        ({"model_type": "hyperclovax", "logits_scaling": 8.0}, 0.0, 8.0, None),
        ({"model_type": "minicpm", "dim_model_base": 4}, 0.0, 0.25, None),
        ({"model_type": "gemma2"}, 1.0, 1.0, 30.0),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 20.0}, 1.0, 1.0, 20.0),
        ({"model_type": "muse_glimmer_text", "output_multiplier": 0.5}, 0.0, 0.5, 20.0),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.5}, 0.0, 0.5, None),
    ],
)
def test_what_the_family_does_to_norm_and_logits(
    tmp_path: Path, changes: dict[str, Any], gain: float, scale: float, cap: float | None
) -> None:
    files = read_verifier_files(write_verifier(tmp_path, **changes))
    assert (files.norm_gain_offset, files.logit_scale, files.final_logit_softcapping) == (gain, scale, cap)
    weights = load_verifier_weights(files)
    assert torch.equal(weights.norm_gain, torch.full((H,), 1.0 + gain))


def test_a_text_config_that_says_null_and_one_that_says_nothing(tmp_path: Path) -> None:
    for name, stated, cap in (("null", {"final_logit_softcapping": None}, None), ("nothing", {}, 30.0)):
        config = {"model_type": "paligemma", "text_config": {**NESTED, "model_type": "gemma2", **stated}}
        assert read_verifier_files(write_verifier(tmp_path / name, config=config)).final_logit_softcapping == cap


# ---------------------------------------------------------------- rope

YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 1e6}, {"rope_type": "default"}),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {"rope_type": "default"}),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}}, {"rope_type": "yarn", **YARN}),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}}, {"rope_type": "yarn", **YARN}),
        ({"rope_theta": 1000000, "rope_scaling": None}, {"rope_type": "default"}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "su", "factor": 2.0}},
            {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 512},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
            {"rope_type": "linear", "factor": 8.0},
        ),
        (
            {
                "rope_parameters": {
                    "hybrid": {"rope_theta": 1e6, "rope_type": "default"},
                    "hybrid_sliding": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
            {"rope_type": "default"},
        ),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, {"rope_type": "default"}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_local_base_freq": 1e4},
            {"rope_type": "dynamic", "factor": 2.0},
        ),
    ],
)
def test_one_rope_from_every_layout(tmp_path: Path, changes: dict[str, Any], rope: dict[str, Any]) -> None:
    for number, config in enumerate(
        (
            {**VERIFIER, "rope_theta": None, **changes},
            {"architectures": ["X"], "text_config": {**NESTED, "rope_theta": None, **changes}},
        )
    ):
        assert read_verifier_files(write_verifier(tmp_path / str(number), config=config)).rope == {
            **rope,
            "rope_theta": 1e6,
        }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "cosmic", "factor": 2.0}}, "'cosmic'"),
        ({"rope_parameters": {"rope_type": 7, "rope_theta": 1e4}}, "unknown rope_type 7"),
        ({"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}}, "unknown rope_type"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor of rope is '4', not a number"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": 0}}, "factor of rope is 0, not a number"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1, None]}},
            "short_factor of rope is [1, None], not a list of",
        ),
        ({"rope_scaling": "yarn"}, "not an object"),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "full_attention"),
    ],
)
def test_a_rope_that_cannot_be_read_is_no_default(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    refused(write_verifier(tmp_path, **changes), "config.json", words)


def test_two_rope_types(tmp_path: Path) -> None:
    scaling = {"type": "linear", "rope_type": "yarn", **YARN}
    files = read_verifier_files(write_verifier(tmp_path, rope_scaling=scaling))
    assert (files.rope["rope_type"], codes(files)) == ("yarn", ["rope_type_conflict"])


def test_two_rope_bases_and_none(tmp_path: Path) -> None:
    path = write_verifier(tmp_path / "two", rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    files = read_verifier_files(path)
    assert files.rope["rope_theta"] == 1e6
    assert codes(files) == ["rope_base_conflict"]
    for kind, base in (("llama", 1e4), ("gpt_oss", 1.5e5), ("gemma3_text", 1e6)):
        files = read_verifier_files(write_verifier(tmp_path / kind, rope_theta=None, model_type=kind))
        assert (files.rope["rope_theta"], codes(files)) == (base, ["rope_base_absent"])


# ---------------------------------------------------------------- tensors by byte range


def test_tensors_are_read_by_byte_range(tmp_path: Path) -> None:
    files = read_verifier_files(write_kimi_like(tmp_path))
    shard = load_file(files.head.file)
    wanted = torch.tensor([5, 3, 3, 60, 0, 63])
    head = shard["language_model.lm_head.weight"]
    assert torch.equal(load_tensor(files.head), head)
    assert torch.equal(load_rows(files.head, wanted), head[wanted])
    assert torch.equal(torch.cat([piece.clone() for piece in tensor_chunks(files.head, 100)]), head.flatten())
    weights = load_verifier_weights(files, wanted)
    assert torch.equal(weights.head, head[wanted])
    assert weights.embedding.shape == (V, H)
    assert weights.describe()[1] == "language_model.lm_head.weight model-00006-of-00006.safetensors [64, 16] BF16"
    with pytest.raises(BadInput, match="64"):
        load_verifier_weights(files, torch.tensor([64]))


def test_only_the_wanted_shards_are_needed_for_the_weights(tmp_path: Path) -> None:
    files = read_verifier_files(write_kimi_like(tmp_path))
    for number in (2, 3, 4, 5):
        (tmp_path / f"model-{number:05}-of-00006.safetensors").unlink()
    assert load_verifier_weights(files).head.shape == (V, H)


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    files = read_verifier_files(write_verifier(tmp_path))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:400])
    with pytest.raises(UnreadableFile, match="ended inside tensor"):
        load_tensor(files.final_norm if files.final_norm.info.end > 400 else files.head)


# ---------------------------------------------------------------- fingerprints


def test_fingerprints(tmp_path: Path) -> None:
    path = write_verifier(tmp_path / "a")
    (path / "tokenizer.json").write_text("{}")
    other = tmp_path / "b"
    shutil.copytree(path, other)
    (other / "config.json").write_text(json.dumps({**VERIFIER, "transformers_version": "9"}, indent=4))
    assert config_fingerprint(path) == config_fingerprint(other)
    assert tokenizer_fingerprint(path) == tokenizer_fingerprint(other)
    write_config(other, {**VERIFIER, "rope_theta": 1.0})
    (other / "tokenizer.json").write_text("{ }")
    assert config_fingerprint(path) != config_fingerprint(other)
    assert tokenizer_fingerprint(path) != tokenizer_fingerprint(other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match="no tokenizer"):
        tokenizer_fingerprint(other)
