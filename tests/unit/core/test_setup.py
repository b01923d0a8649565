"""What a run starts from: the drafter's shape, its weights, and every contradiction named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from eagle3_core.checkpoint.config_styles import speculators_config
from eagle3_core.checkpoint.format import DrafterSource
from eagle3_core.contract.drafter_config import DrafterConfig, expected_tensors
from eagle3_core.contract.params import TrainParams
from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.errors import BadInput, CheckpointError
from eagle3_core.model.vocab_map import load_vocab_map
from eagle3_core.training.setup import build_drafter, choose_vocab_map, make_target_head, resolve_shape
from eagle3_core.verifier.tensors import load_verifier_weights
from tests import tiny


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Any]:
    return tiny.make_training_inputs(tmp_path)


def source_of(**changes: Any) -> tuple[DrafterSource, dict[str, torch.Tensor]]:
    """A drafter of 15 tensors over the tokens 100..163, each head row filled with its token's number."""
    config = DrafterConfig(
        **{
            "hidden_size": tiny.HIDDEN,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": tiny.VOCAB,
            "draft_vocab_size": 64,
            "aux_layer_ids": tiny.AUX_LAYER_IDS,
            "rope": {"rope_type": "default", "rope_theta": 777.0},
            "norm_before_residual": True,
            **changes,
        }
    )
    shapes = expected_tensors(config)
    tensors = {name: torch.randn(shape) for name, (shape, kind) in shapes.items() if kind == "float"}
    del tensors["embed_tokens.weight"]
    tokens = torch.arange(100, 164)
    tensors["lm_head.weight"] = tokens[:, None].float().expand(64, tiny.HIDDEN).clone()
    tensors["d2t"] = tokens - torch.arange(64)
    tensors["t2d"] = torch.zeros(tiny.VOCAB, dtype=torch.bool).index_fill(0, tokens, True)
    return DrafterSource(config, "specforge", None), tensors


def shape_of(inputs: dict[str, Any], source: DrafterSource | None, **asked: Any) -> Any:
    params = TrainParams(**{**inputs, **asked})
    files, meta = read_verifier_files(Path(params.verifier)), HiddenStateStore(Path(params.data_dir)).meta
    return resolve_shape(params, files, meta, source, 64)


def test_a_fresh_drafter_takes_its_sizes_from_the_verifier(inputs: dict[str, Any]) -> None:
    config = shape_of(inputs, None, head_dim=16).config
    assert (config.intermediate_size, config.num_attention_heads, config.head_dim) == (64, 4, 16)
    assert (config.aux_layer_ids, config.norm_before_residual) == (tiny.AUX_LAYER_IDS, False)


def test_flags_rope_and_head_dim_come_from_the_source(inputs: dict[str, Any]) -> None:
    config = shape_of(inputs, source_of()[0], norm_before_residual=True).config
    assert (config.norm_before_residual, config.rope["rope_theta"], config.head_dim) == (True, 777.0, 16)
    assert config.intermediate_size == 48


@pytest.mark.parametrize(
    ("changes", "asked", "said"),
    [
        ({"aux_layer_ids": (1, 3, 5)}, {}, r"entering layers \[2, 4, 5\].*made for those entering \[1, 3, 5\]"),
        ({}, {"norm_before_residual": False}, "norm_before_residual False was asked for.*made with True"),
        ({}, {"fc_norm": True}, "fc_norm True was asked for.*made with False"),
    ],
)
def test_a_contradiction_names_both_sides_and_can_be_overridden_on_record(
    inputs: dict[str, Any], changes: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    source, _ = source_of(**changes)
    with pytest.raises(BadInput, match=said):
        shape_of(inputs, source, finetune_from="/s", **asked)
    shape = shape_of(inputs, source, finetune_from="/s", allow_source_mismatch=True, **asked)
    assert len(shape.overrides) == 1
    assert shape.config.aux_layer_ids == tiny.AUX_LAYER_IDS
    for name, value in asked.items():
        assert dict(shape.config)[name] == value


@pytest.mark.parametrize(
    ("changes", "asked", "said"),
    [
        ({"hidden_size": 16}, {}, "hidden size 16"),
        ({"num_aux_states": 4, "aux_layer_ids": None}, {}, "fuses 4 aux states"),
        ({}, {"head_dim": 8}, "head_dim 8 was asked for.*has 16"),
        ({}, {"aux_layer_ids": (2, 3, 5)}, r"aux_layer_ids \[2, 3, 5\].*\[2, 4, 5\]"),
    ],
)
def test_what_cannot_be_overridden(
    inputs: dict[str, Any], changes: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        shape_of(inputs, source_of(**changes)[0], finetune_from="/s", allow_source_mismatch=True, **asked)


def test_head_rows_are_matched_by_verifier_token(inputs: dict[str, Any]) -> None:
    source, tensors = source_of()
    vocab_map = load_vocab_map(Path(inputs["vocab_map_dir"]))
    weights = load_verifier_weights(read_verifier_files(Path(inputs["verifier"])), vocab_map.target_ids_D)
    told: dict[str, Any] = {}

    def report(title: str, text: str, **data: Any) -> None:
        told[title] = (text, data)

    drafter = build_drafter(shape_of(inputs, source), vocab_map, weights, (source, tensors), 0, report)
    text, data = told["finetune_from"]
    assert text.startswith("loaded 13 tensors, skipped 2 (t2d, d2t)")
    both = [i for i, token in enumerate(vocab_map.target_ids_D.tolist()) if 100 <= token < 164]
    assert data["head_rows_matched"] == len(both) > 0
    for draft, token in enumerate(vocab_map.target_ids_D.tolist()):
        expected = torch.full((tiny.HIDDEN,), float(token)) if draft in both else weights.head[draft]
        assert torch.equal(drafter.lm_head.weight[draft], expected)
    assert torch.equal(drafter.fc.weight, tensors["fc.weight"])
    assert torch.equal(drafter.embed_tokens.weight, weights.embedding)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.update(d2t=t["d2t"] + torch.arange(64)), "d2t"),
        (lambda t: t.update(t2d=t["t2d"].roll(1)), "name different tokens"),
        (lambda t: t.pop("fc.weight"), "tensors missing: .'fc.weight'"),
        (lambda t: t.update(extra=torch.ones(1)), "unknown: .'extra'"),
        (lambda t: t.update({"fc.weight": torch.ones(3, 3)}), "fc.weight has shape"),
    ],
)
def test_a_damaged_source_is_refused(inputs: dict[str, Any], spoil: Any, said: str) -> None:
    source, tensors = source_of()
    spoil(tensors)
    vocab_map = load_vocab_map(Path(inputs["vocab_map_dir"]))
    weights = load_verifier_weights(read_verifier_files(Path(inputs["verifier"])), vocab_map.target_ids_D)
    with pytest.raises(BadInput, match=said):
        build_drafter(shape_of(inputs, source), vocab_map, weights, (source, tensors), 0, lambda *_, **__: None)


def test_the_vocabulary_map_must_fit_verifier_and_request(inputs: dict[str, Any]) -> None:
    files = read_verifier_files(Path(inputs["verifier"]))
    with pytest.raises(BadInput, match="draft_vocab_size 65 was asked for, the vocabulary map has 64"):
        choose_vocab_map(TrainParams(**inputs, draft_vocab_size=65), files, None)
    from_source = TrainParams(**{**inputs, "vocab_map_dir": None, "finetune_from": "/s"})
    assert choose_vocab_map(from_source, files, source_of()[1]).target_ids_D.tolist() == list(range(100, 164))
    with pytest.raises(BadInput, match="no d2t and t2d"):
        choose_vocab_map(from_source, files, {})


def test_targets_go_through_the_final_norm_unless_the_store_is_post_norm(inputs: dict[str, Any]) -> None:
    files = read_verifier_files(Path(inputs["verifier"]))
    weights = load_verifier_weights(files, torch.tensor([3, 5]))
    states = torch.randn(4, tiny.HIDDEN)
    normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + files.rms_norm_eps) * weights.norm_gain
    cpu = torch.device("cpu")
    assert torch.allclose(make_target_head(weights, "pre_norm", cpu)(states), normed @ weights.head.T, atol=1e-5)
    assert torch.allclose(make_target_head(weights, "post_norm", cpu)(states), states @ weights.head.T, atol=1e-5)


def test_a_drafter_of_speculators_0_3_was_made_for_the_states_behind_its_layers(inputs: dict[str, Any]) -> None:
    config = source_of(aux_layer_ids=None)[0].config
    old = DrafterSource(config, "speculators", None, captured_after=True)
    with pytest.raises(
        BadInput, match=r"entering layers \[2, 4, 5\].*entering \[3, 5, 6\] \(the default of speculators 0.3"
    ):
        shape_of(inputs, old, finetune_from="/s")
    assert shape_of(inputs, old, finetune_from="/s", allow_source_mismatch=True).overrides
    assert not shape_of(inputs, DrafterSource(config, "specforge", None), finetune_from="/s").overrides


def test_a_source_for_another_vocabulary_is_a_contradiction(inputs: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"made for 300 verifier tokens.*has 259"):
        shape_of(inputs, source_of(vocab_size=300)[0], finetune_from="/s")


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 260), ("num_hidden_layers", 9)])
def test_a_store_of_another_verifier_is_refused(inputs: dict[str, Any], name: str, value: int) -> None:
    params = TrainParams(**inputs)
    meta = HiddenStateStore(Path(params.data_dir)).meta.model_copy(update={name: value})
    with pytest.raises(BadInput, match=f"with {name} {value}, the verifier"):
        resolve_shape(params, read_verifier_files(Path(params.verifier)), meta, None, 64)


def test_a_last_state_from_before_the_last_layer_is_refused(inputs: dict[str, Any]) -> None:
    params = TrainParams(**inputs)
    meta = HiddenStateStore(Path(params.data_dir)).meta.model_copy(update={"last_layer_id": 7})
    with pytest.raises(BadInput, match=r"entering layer 7 as the last one.*behind the last layer \(8\)"):
        resolve_shape(params, read_verifier_files(Path(params.verifier)), meta, None, 64)


def choose(inputs: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    params = TrainParams(**{**inputs, "vocab_map_dir": None, "finetune_from": "/s"})
    return choose_vocab_map(params, read_verifier_files(Path(params.verifier)), tensors)


def test_a_map_in_order_of_frequency_is_taken_in_order_of_tokens(inputs: dict[str, Any]) -> None:
    """Model-Optimizer's offsets go down as well as up, and it writes no t2d."""
    source, tensors = source_of()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(100, 164)[order]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = tokens - torch.arange(64)
    del tensors["t2d"]
    assert (tensors["d2t"].diff() < 0).any()
    vocab_map = choose(inputs, tensors)
    assert vocab_map.target_ids_D.tolist() == list(range(100, 164))
    weights = load_verifier_weights(read_verifier_files(Path(inputs["verifier"])), vocab_map.target_ids_D)
    drafter = build_drafter(shape_of(inputs, source), vocab_map, weights, (source, tensors), 0, lambda *_, **__: None)
    assert drafter.lm_head.weight[:, 0].tolist() == list(range(100, 164))


def test_a_full_vocabulary_needs_no_map(inputs: dict[str, Any]) -> None:
    full = {"lm_head.weight": torch.ones(tiny.VOCAB, tiny.HIDDEN)}
    assert choose(inputs, full).target_ids_D.tolist() == list(range(tiny.VOCAB))
    with pytest.raises(BadInput, match="no d2t and t2d"):
        choose(inputs, {"lm_head.weight": torch.ones(64, tiny.HIDDEN)})


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        (torch.arange(100, 164), "looks absolute"),
        (torch.zeros(64, dtype=torch.int64), "all zero.*0..63, an arbitrary slice"),
        (torch.full((64,), 250), "does not name 64 distinct tokens of 0..258"),
        (torch.full((64,), 99), "d2t and t2d name different tokens"),
    ],
)
def test_a_map_that_cannot_be_meant_is_refused(inputs: dict[str, Any], d2t: torch.Tensor, said: str) -> None:
    source, tensors = source_of()
    tensors["d2t"] = d2t
    with pytest.raises(BadInput, match=said):
        choose(inputs, tensors)
    vocab_map = load_vocab_map(Path(inputs["vocab_map_dir"]))
    weights = load_verifier_weights(read_verifier_files(Path(inputs["verifier"])), vocab_map.target_ids_D)
    with pytest.raises(BadInput, match=said):
        build_drafter(shape_of(inputs, source), vocab_map, weights, (source, tensors), 0, lambda *_, **__: None)


def test_a_reduced_head_without_a_map_has_no_meaning(inputs: dict[str, Any]) -> None:
    source, tensors = source_of()
    del tensors["d2t"], tensors["t2d"]
    vocab_map = load_vocab_map(Path(inputs["vocab_map_dir"]))
    weights = load_verifier_weights(read_verifier_files(Path(inputs["verifier"])), vocab_map.target_ids_D)
    with pytest.raises(BadInput, match="64 head rows for 259 verifier tokens, and no d2t"):
        build_drafter(shape_of(inputs, source), vocab_map, weights, (source, tensors), 0, lambda *_, **__: None)


@pytest.mark.parametrize("form", ["speculators", "specforge"])
def test_the_shape_can_be_given_as_a_drafters_config(inputs: dict[str, Any], tmp_path: Path, form: str) -> None:
    config, _ = source_of(num_hidden_layers=2)
    stated = speculators_config(config.config, "verifier", ["LlamaForCausalLM"], 3)
    if form == "specforge":
        flat = stated["transformer_layer_config"] | {"architectures": ["LlamaForCausalLMEagle3"]}
        ids = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in tiny.AUX_LAYER_IDS]}
        stated = flat | {"draft_vocab_size": 64, "norm_before_residual": True, "eagle_config": ids}
    file = tmp_path / "any-name.json"
    file.write_text(json.dumps(stated))
    made = shape_of(inputs, None, drafter_config=str(file), intermediate_size=40).config
    assert made == config.config.model_copy(
        update={"intermediate_size": 40, "bos_token_id": made.bos_token_id, "eos_token_id": made.eos_token_id}
    )
    file.write_text(json.dumps(stated | {"draft_vocab_size": 32}))
    with pytest.raises(BadInput, match=r"any-name.json says draft_vocab_size 32, .* have 64"):
        shape_of(inputs, None, drafter_config=str(file))
    with pytest.raises(ValidationError, match="give one"):
        shape_of(inputs, None, drafter_config=str(file), finetune_from=str(tmp_path))


def test_norms_before_fc_that_exclude_each_other(inputs: dict[str, Any], tmp_path: Path) -> None:
    both = source_of(norm_before_fc=True)[0].config
    file = tmp_path / "drafter.json"
    file.write_text(json.dumps(speculators_config(both, "verifier", [], 3)))
    with pytest.raises(BadInput, match="norm_before_fc and fc_norm exclude each other"):
        shape_of(inputs, None, drafter_config=str(file), fc_norm=True)
    file.write_text(json.dumps(speculators_config(both.model_copy(update={"fc_norm": True}), "verifier", [], 3)))
    with pytest.raises(CheckpointError, match="norm_before_fc and fc_norm are both true"):
        shape_of(inputs, None, drafter_config=str(file))


def test_a_text_longer_than_the_rope_was_made_for_is_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    inputs = tiny.make_training_inputs(tmp_path)
    tiny.make_verifier(tmp_path / "stretched", rope_parameters=scaling, max_position_embeddings=48)
    asked = {"verifier": str(tmp_path / "stretched")}
    with pytest.raises(BadInput, match=r"max_seq_len 64: with rope_type dynamic .* longer than 48 tokens"):
        shape_of(inputs, None, **asked)
    assert shape_of(inputs, None, **asked, max_seq_len=48).config.rope == scaling
