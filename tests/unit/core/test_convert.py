"""Checkpoints converted from every format to every format and back: the same weights, the same meaning, or refused."""

import json
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from eagle3_core.checkpoint.compare import compare
from eagle3_core.checkpoint.convert import convert
from eagle3_core.checkpoint.format import read_drafter_config, read_drafter_tensors
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.params import ServedFormat
from eagle3_core.errors import CheckpointError
from tests.cases import peer_checkpoint
from tests.converting import drafter, same, weights
from tests.judging import WEIGHTS, drop, foreign, put
from tests.makers import DRAFTER, D, H, V, drafter_tensors, random, verifier_tensors, write_drafter, write_verifier

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "attention_bias")
TARGETS: tuple[ServedFormat, ...] = get_args(ServedFormat)
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
]
MLA = {
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    return write_verifier(tmp_path / "verifier", max_position_embeddings=2048)


# ---------------------------------------------------------------- every format, there and back


@pytest.mark.parametrize(("there", "back"), list(product(TARGETS, TARGETS)))
def test_there_and_back_changes_nothing(
    tmp_path: Path, verifier: Path, there: ServedFormat, back: ServedFormat
) -> None:
    source = drafter(tmp_path)
    first = convert(source, tmp_path / "there", there, verifier=verifier)
    second = convert(first.path, tmp_path / "back", back, verifier=verifier)
    direct = convert(source, tmp_path / "direct", back, verifier=verifier)
    assert (first.verdict.verdict, second.verdict.verdict) == ("valid", "valid"), second.to_dict()
    same(source, first.path)
    same(source, second.path)
    for name in ("config.json", WEIGHTS):
        assert (second.path / name).read_bytes() == (direct.path / name).read_bytes(), "the way makes no difference"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", ["speculators-0.9.0", "specforge-sglang", "specforge-hf", "modelopt", "eagle-official", "speculators-0.3.0"]
)
def test_real_checkpoints_come_back_or_are_refused_with_a_reason(
    tmp_path: Path, name: str, target: ServedFormat
) -> None:
    source = peer_checkpoint(name) / ("0" if name.startswith("speculators") else "")
    embedding = load_file(peer_checkpoint("specforge-hf") / WEIGHTS)["embed_tokens.weight"]
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 8192, "max_position_embeddings": 2048}
    layers = 8 if name == "modelopt" else 16
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.clone(),
        "model.norm.weight": torch.ones(256).bfloat16(),
    }
    verifier = write_verifier(tmp_path / "verifier", tensors, num_hidden_layers=layers, **sizes)
    trained_with_norm = name.startswith("speculators")
    refused = {
        **dict.fromkeys(("sglang", "both"), "norm_before_residual" if trained_with_norm else None),
        "eagle": "norm_before_residual" if trained_with_norm else "yarn" if name == "modelopt" else None,
    }
    if (reason := refused.get(target)) is not None:
        with pytest.raises(CheckpointError, match=reason):
            convert(source, tmp_path / "out", target, verifier=verifier)
        assert not (tmp_path / "out").exists()
        return
    out = convert(source, tmp_path / "out", target, verifier=verifier).path
    back = convert(out, tmp_path / "back", "vllm", verifier=verifier).path
    for path in (out, back):
        same(source, path, verifier=verifier)


def test_the_four_foreign_formats_hold_one_drafter(tmp_path: Path) -> None:
    base = peer_checkpoint("specforge-hf")
    for name in ("specforge-sglang", "eagle-official", "modelopt"):
        found = compare(base, peer_checkpoint(name), tolerance=1e-3)
        # They were written with other rope and positions; official EAGLE rounded to 16 bits of another kind.
        told = {difference.what for difference in found.differences}
        assert told <= {"rope", "max_position_embeddings", "eagle_aux_hidden_state_layer_ids"}, found.to_dict()


# ---------------------------------------------------------------- what each format holds


def test_what_each_format_holds(tmp_path: Path, verifier: Path) -> None:
    source = drafter(tmp_path)
    held = {to: weights(convert(source, tmp_path / to, to, verifier=verifier).path) for to in TARGETS}
    ours = set(drafter_tensors())
    assert set(held["speculators"]) == set(held["vllm"]) == set(held["both"]) == ours
    official = {name.replace("layers.0.", "midlayer.") for name in ours}
    assert set(held["sglang"]) == set(held["eagle"]) == official
    configs = {to: json.loads((tmp_path / to / "config.json").read_text()) for to in TARGETS}
    assert "model_type" not in configs["speculators"]
    assert configs["speculators"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert configs["vllm"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert configs["both"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert configs["both"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert configs["both"]["num_aux_hidden_states"] == 3
    assert configs["eagle"]["architectures"] == ["LlamaForCausalLM"]
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert all(configs[to][flag] is False for to in TARGETS for flag in flags)
    assert all("target_hidden_size" not in configs[to] for to in TARGETS if to != "speculators")


@pytest.mark.parametrize(
    ("family", "states", "ids"),
    [
        ("llama", [2, 4, 5], [1, 3, 4]),
        ("llama", [3, 5, 8], [2, 4, 7]),
        ("kimi_k2", [2, 4, 5], [1, 3, 4]),
        ("deepseek_v3", [3, 5, 8], [3, 5, 8]),
        ("deepseek_v3", [0, 4, 5], [0, 4, 5]),
        ("deepseek_v3", [1, 4, 5], None),
        ("gpt_oss", [3, 5, 6], [2, 4, 5]),
        ("gpt_oss", [0, 5, 8], [0, 5, 8]),
        ("qwen3", [0, 4, 5], None),
    ],
)
def test_layer_ids_for_sglang_follow_the_family(
    tmp_path: Path, family: str, states: list[int], ids: list[int] | None
) -> None:
    source = drafter(tmp_path, aux_layer_ids=states)
    verifier = write_verifier(tmp_path / "verifier", model_type=family, max_position_embeddings=2048)
    if ids is None:
        with pytest.raises(CheckpointError, match="cannot be told to SGLang"):
            convert(source, tmp_path / "out", "both", verifier=verifier)
        return
    out = convert(source, tmp_path / "out", "sglang", verifier=verifier).path
    config = json.loads((out / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
    assert read_drafter_config(out).config.aux_layer_ids == tuple(states), "and they are read back as they are meant"
    same(source, out, verifier=verifier)


def test_a_map_in_order_of_frequency_with_negative_offsets_is_put_in_order(tmp_path: Path, verifier: Path) -> None:
    tensors = drafter_tensors()
    order = torch.randperm(D, generator=torch.Generator().manual_seed(1))
    tokens = (tensors["d2t"] + torch.arange(D))[order]
    shuffled = {"d2t": tokens - torch.arange(D), "lm_head.weight": tensors["lm_head.weight"][order]}
    assert int(shuffled["d2t"].min()) < 0
    source = convert(drafter(tmp_path), tmp_path / "vllm", "vllm").path
    save_file(weights(source) | shuffled, source / WEIGHTS)
    (source / "manifest.json").unlink()
    out = convert(source, tmp_path / "out", "speculators", verifier=verifier)
    read = read_drafter_tensors(out.path)
    assert torch.equal(read["d2t"], tensors["d2t"])
    assert torch.equal(read["t2d"], tensors["t2d"])
    assert torch.equal(read["lm_head.weight"], tensors["lm_head.weight"])
    assert any("order of verifier tokens" in note for note in out.notes)
    same(source, out.path)


def test_older_names_of_norms_are_written_anew(tmp_path: Path, verifier: Path) -> None:
    source = drafter(tmp_path, fc_norm=True)
    older = convert(source, tmp_path / "sglang", "sglang", verifier=verifier).path
    names = {f"fc_norm.{index}.weight": f"aux_norm_{word}.weight" for index, word in enumerate(("low", "mid", "high"))}
    save_file({names.get(name, name): tensor for name, tensor in weights(older).items()}, older / WEIGHTS)
    config = json.loads((older / "config.json").read_text())
    config["use_aux_norm"] = config.pop("fc_norm")
    (older / "config.json").write_text(json.dumps(config))
    (older / "manifest.json").unlink()
    served = {one.server: one.outcome for one in judge(older, verifier=verifier).servers}
    assert (served["sglang"], served["vllm-v1"]) == ("loads", "refuses")
    same(source, older)
    same(source, convert(older, tmp_path / "both", "both", verifier=verifier).path)


@pytest.mark.parametrize("permuted", [False, True])
def test_a_map_of_a_full_vocabulary_goes_into_the_head(tmp_path: Path, verifier: Path, permuted: bool) -> None:
    full = DRAFTER.model_copy(update={"draft_vocab_size": V})
    tensors = drafter_tensors(full)
    source = write_drafter(tmp_path / "source", config=full)
    tokens = torch.randperm(V, generator=torch.Generator().manual_seed(4)) if permuted else torch.arange(V)
    held = {"d2t": tokens - torch.arange(V), "t2d": torch.ones(V, dtype=torch.bool)}
    save_file(weights(source) | held | {"lm_head.weight": tensors["lm_head.weight"][tokens].clone()}, source / WEIGHTS)
    (source / "manifest.json").unlink()
    for to in TARGETS:
        out = convert(source, tmp_path / to, to, verifier=verifier).path
        assert "d2t" not in weights(out)
        assert torch.equal(weights(out)["lm_head.weight"], tensors["lm_head.weight"])
        same(source, out)
    save_file(weights(source) | {"d2t": torch.ones(V, dtype=torch.int64)}, source / WEIGHTS)
    with pytest.raises(CheckpointError, match="does not lead to each of the 64 tokens once"):
        convert(source, tmp_path / "out", "vllm")


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=strategies.data())
def test_any_drafter_goes_anywhere_unchanged_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: strategies.DataObject
) -> None:
    flags = {name: data.draw(strategies.booleans(), label=name) for name in FLAGS}
    flags["fc_norm"] &= not flags["norm_before_fc"]
    aux = tuple(sorted(data.draw(strategies.sets(strategies.integers(0, 8), min_size=1, max_size=4), label="states")))
    source_config = {
        **flags,
        "num_hidden_layers": data.draw(strategies.integers(1, 3), label="layers"),
        "aux_layer_ids": aux,
        "num_aux_states": len(aux),
        "sliding_window": data.draw(strategies.sampled_from([None, 128]), label="window"),
        "rope": data.draw(strategies.sampled_from(ROPES), label="rope"),
        "draft_vocab_size": data.draw(strategies.sampled_from([D, V]), label="D"),
    }
    root = tmp_path_factory.mktemp("any")
    family = data.draw(strategies.sampled_from(["llama", "kimi_k2", "gpt_oss", "qwen3"]), label="family")
    verifier = write_verifier(root / "verifier", model_type=family, max_position_embeddings=2048)
    source = drafter(root, **source_config)
    there, back = (data.draw(strategies.sampled_from(TARGETS), label=label) for label in ("there", "back"))
    try:
        out = convert(source, root / "there", there, verifier=verifier).path
        out = convert(out, root / "back", back, verifier=verifier).path
    except CheckpointError:
        assert not list(root.glob(".convert*"))
        return
    same(source, out, verifier=verifier)
    assert read_drafter_config(out).config.aux_layer_ids == aux


def test_more_than_one_layer_is_named_for_each_server(tmp_path: Path, verifier: Path) -> None:
    source = drafter(tmp_path, num_hidden_layers=2)
    norm, other = "layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight"
    names = {to: set(weights(convert(source, tmp_path / to, to).path)) for to in ("vllm", "sglang", "both")}
    assert {to: (norm in held, other in held) for to, held in names.items()} == {
        "vllm": (True, False),
        "sglang": (False, True),
        "both": (True, True),
    }
    for to in ("sglang", "both"):
        same(source, convert(tmp_path / to, tmp_path / f"{to}-back", "speculators", verifier=verifier).path)
    with pytest.raises(CheckpointError, match="2 layers"):
        convert(source, tmp_path / "eagle", "eagle", verifier=verifier)
    tensors = weights(tmp_path / "both") | {other: random(H, seed=5)}
    save_file(tensors, tmp_path / "both" / WEIGHTS)
    with pytest.raises(CheckpointError, match="two names for one tensor"):
        convert(tmp_path / "both", tmp_path / "again", "vllm")


@pytest.mark.parametrize("changes", [{"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}])
@pytest.mark.parametrize("target", ["speculators", "vllm", "sglang", "both"])
def test_norms_that_servers_know_are_carried(
    tmp_path: Path, verifier: Path, target: ServedFormat, changes: dict[str, Any]
) -> None:
    source = drafter(tmp_path, **changes)
    same(source, convert(source, tmp_path / "out", target, verifier=verifier).path)
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        convert(source, tmp_path / "eagle", "eagle", verifier=verifier)


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    [
        ({"norm_before_residual": True}, "both", "residual_norm"),
        ({"qk_norm": True}, "sglang", "qwen3"),
        ({"attention_bias": True}, "sglang", "bias_dropped"),
        ({"own_embedding": True}, "sglang", "embedding_replaced"),
        ({"sliding_window": 128}, "eagle", "sliding window of 128"),
        ({"aux_layer_ids": (3, 4, 6)}, "eagle", "it always takes"),
        ({"aux_layer_ids": (2, 3, 4, 5), "num_aux_states": 4}, "eagle", "4 aux states"),
    ],
)
def test_what_a_target_cannot_express_is_refused(
    tmp_path: Path, verifier: Path, changes: dict[str, Any], target: ServedFormat, reason: str
) -> None:
    source = drafter(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=reason):
        convert(source, tmp_path / "out", target, verifier=verifier)
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("source", "verifier")] == []
    same(source, convert(source, tmp_path / "vllm", "vllm", verifier=verifier).path)


def test_latent_attention_has_no_speculators_format(tmp_path: Path) -> None:
    source = drafter(tmp_path, mla=MLA, num_key_value_heads=4, head_dim=6)
    with pytest.raises(CheckpointError, match="no latent attention"):
        convert(source, tmp_path / "out", "speculators")
    with pytest.raises(CheckpointError, match="latent attention"):
        convert(source, tmp_path / "out", "eagle")
    for to in ("vllm", "sglang", "both"):
        same(source, convert(source, tmp_path / to, to).path)
        same(source, convert(tmp_path / to, tmp_path / f"{to}-back", "vllm").path)


def test_aux_states_of_another_width(tmp_path: Path, verifier: Path) -> None:
    wide = {"fc.weight": random(H, 3 * 40, seed=2)}
    source = convert(drafter(tmp_path), tmp_path / "vllm", "vllm").path
    config = json.loads((source / "config.json").read_text()) | {"target_hidden_size": 40}
    (source / "config.json").write_text(json.dumps(config))
    save_file(weights(source) | wide, source / WEIGHTS)
    (source / "manifest.json").unlink()
    for to in ("vllm", "sglang", "both"):
        same(source, convert(source, tmp_path / f"out-{to}", to).path)
    with pytest.raises(CheckpointError, match="other_width"):
        convert(source, tmp_path / "speculators", "speculators", verifier_name="a/b")


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rope_goes_there_and_back_and_transformers_reads_it(
    tmp_path: Path, verifier: Path, rope: dict[str, Any]
) -> None:
    source = drafter(tmp_path, rope=rope)
    for to in ("vllm", "sglang", "both"):
        out = convert(source, tmp_path / to, to, verifier=verifier).path
        same(source, convert(out, tmp_path / f"{to}-back", "speculators", verifier=verifier).path)
        config = AutoConfig.from_pretrained(out)
        assert isinstance(config, LlamaConfig)
        assert config.rope_parameters == rope
        assert (config.draft_vocab_size, config.head_dim) == (D, DRAFTER.head_dim)
    if rope["rope_type"] in ("default", "linear"):
        out = convert(source, tmp_path / "eagle", "eagle", verifier=verifier).path
        told = json.loads((out / "config.json").read_text())
        plain = rope["rope_type"] == "default"
        assert told["rope_scaling"] == (None if plain else {"type": "linear", "factor": 8.0})
        same(source, out)
    else:
        with pytest.raises(CheckpointError, match=rope["rope_type"]):
            convert(source, tmp_path / "eagle", "eagle", verifier=verifier)


def test_transformers_reads_configs_of_other_layers(tmp_path: Path) -> None:
    qwen = convert(drafter(tmp_path / "q", qk_norm=True), tmp_path / "qwen3", "vllm").path
    assert AutoConfig.from_pretrained(qwen).model_type == "qwen3"
    latent = convert(drafter(tmp_path / "m", mla=MLA, num_key_value_heads=4, head_dim=6), tmp_path / "mla", "both").path
    assert AutoConfig.from_pretrained(latent).kv_lora_rank == MLA["kv_lora_rank"]


# ---------------------------------------------------------------- what the verifier lends


def test_embedding_and_head_are_the_verifiers_where_the_format_needs_them(tmp_path: Path) -> None:
    full = DRAFTER.model_copy(update={"draft_vocab_size": V})
    tensors = drafter_tensors(full)
    source = convert(write_drafter(tmp_path / "source", config=full), tmp_path / "vllm", "vllm").path
    kept = {name: t for name, t in weights(source).items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    save_file(kept, source / WEIGHTS)
    (source / "manifest.json").unlink()
    for to, name in (("speculators", "embed_tokens"), ("sglang", "lm_head"), ("both", "lm_head")):
        with pytest.raises(CheckpointError, match=f"holds no {name}.weight, and {to} needs it: give the verifier"):
            convert(source, tmp_path / "out", to)
    # Matrices of verifiers are padded at the end.
    padded = {
        name: torch.cat([t, torch.zeros(8, H).bfloat16()]) if len(t.shape) == 2 else t
        for name, t in verifier_tensors().items()
    }
    verifier = write_verifier(tmp_path / "verifier", padded, max_position_embeddings=2048)
    out = convert(source, tmp_path / "out", "speculators", verifier=verifier)
    read = read_drafter_tensors(out.path)
    assert torch.equal(read["embed_tokens.weight"], padded["model.embed_tokens.weight"][:V])
    assert torch.equal(read["lm_head.weight"], padded["lm_head.weight"][:V])
    assert torch.equal(read["fc.weight"], tensors["fc.weight"])
    assert "d2t" not in read
    same(out.path, convert(out.path, tmp_path / "both", "both", verifier=verifier).path)
    assert compare(source, out.path, verifier=verifier).equal


def test_an_embedding_that_is_not_the_verifiers_is_not_for_sglang(tmp_path: Path, verifier: Path) -> None:
    source = foreign(tmp_path, put("embed_tokens.weight", random(V, H, seed=9)))
    with pytest.raises(CheckpointError, match="embedding_replaced"):
        convert(source, tmp_path / "out", "sglang", verifier=verifier)
    assert not list(tmp_path.glob(".convert*"))


# ---------------------------------------------------------------- what can be read in two ways


def test_ids_of_speculators_0_3_are_written_once_the_verifier_is_known(tmp_path: Path, verifier: Path) -> None:
    source = foreign(tmp_path, eagle_aux_hidden_state_layer_ids=None, speculators_version="0.3.0")
    with pytest.raises(CheckpointError, match=r"3, N//2\+1, N-2"):
        convert(source, tmp_path / "out", "vllm")
    out = convert(source, tmp_path / "out", "vllm", verifier=verifier).path
    assert read_drafter_config(out).config.aux_layer_ids == (3, 5, 6)
    given = convert(source, tmp_path / "given", "vllm", aux_layer_ids=[3, 5, 6]).path
    same(out, given)


def test_nested_ids_that_servers_read_differently_are_asked_for(tmp_path: Path, verifier: Path) -> None:
    source = convert(drafter(tmp_path, aux_layer_ids=(3, 5, 6)), tmp_path / "both", "both", verifier=verifier).path
    config = json.loads((source / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (source / "config.json").write_text(json.dumps(config))
    (source / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"SGLang feeds states \[3, 5, 6\] .* \[2, 4, 5\]. Give aux_layer_ids"):
        convert(source, tmp_path / "out", "vllm", verifier=verifier)
    out = convert(source, tmp_path / "out", "vllm", verifier=verifier, aux_layer_ids=[3, 5, 6]).path
    assert read_drafter_config(out).config.aux_layer_ids == (3, 5, 6)
    for wrong in ([3, 5], [6, 5, 3], [3, 5, 7]):
        with pytest.raises(CheckpointError, match="aux_layer_ids"):
            convert(source, tmp_path / "wrong", "vllm", aux_layer_ids=wrong)


def test_a_verifiers_quantisation_does_not_go_along(tmp_path: Path) -> None:
    source = foreign(tmp_path, quantization_config={"quant_method": "fp8"})
    done = convert(source, tmp_path / "out", "vllm")
    assert "quantization_config" not in json.loads((done.path / "config.json").read_text())
    assert any("quantization_config is left out" in note for note in done.notes)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"norm_before_residual": ...}, "norm_before_residual is not stated"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
    ],
)
def test_what_no_other_format_can_say_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        convert(foreign(tmp_path, **config), tmp_path / "out", "vllm")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop("fc.weight"), "missing_tensor"),
        (drop("d2t"), "missing_tensor"),
        (put("d2t", torch.arange(20, 20 + D)), "d2t"),
        (put("verifier_norm.weight", torch.ones(H)), "unexpected_tensor"),
        (put("norm.weight", torch.full((H,), float("nan"))), "NaN"),
    ],
)
def test_a_damaged_source_gives_nothing(tmp_path: Path, change: Any, reason: str) -> None:
    source = foreign(tmp_path, change)
    with pytest.raises(CheckpointError, match=reason):
        convert(source, tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".convert*"))
