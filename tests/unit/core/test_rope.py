"""Every kind of rotary embedding a drafter computes, against transformers."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_core.contract.rope import normalise_rope
from eagle3_core.errors import BadInput
from eagle3_core.model.rope import inverse_frequencies, longest_text, rotation, rotation_scale

WIDTH, LONGEST = 64, 4096
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn of Kimi": {
        "factor": 32.0, "original_max_position_embeddings": 128, "beta_fast": 1.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "yarn with mscale": {
        "factor": 40.0, "original_max_position_embeddings": 1024, "mscale": 0.707, "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": 1024,
        "short_factor": [1 + 0.1 * i for i in range(WIDTH // 2)], "long_factor": [9.0] * (WIDTH // 2),
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_cosine_and_sine_are_those_of_transformers(name: str) -> None:
    rope = {"rope_type": name.split()[0], "rope_theta": 50000.0, **KINDS[name]}
    config = LlamaConfig(
        hidden_size=2 * WIDTH, num_attention_heads=2, max_position_embeddings=LONGEST, rope_parameters=dict(rope)
    )
    positions = torch.arange(128)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = rotation(inverse_frequencies(rope, WIDTH), positions, torch.float32, rotation_scale(rope))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[:, 0], other[0, :, : WIDTH // 2], rtol=1e-5, atol=1e-5)


def test_how_long_a_text_may_be() -> None:
    assert longest_text({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 131072) == 4096
    assert longest_text({"rope_type": "dynamic"}, 2048) == 2048
    assert longest_text({"rope_type": "yarn", "original_max_position_embeddings": 4096}, 131072) is None


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(BadInput, match="original_max_position_embeddings is missing"):
        inverse_frequencies({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, WIDTH)
    with pytest.raises(BadInput, match="short_factor has 3 entries"):
        inverse_frequencies({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3}, WIDTH)
    with pytest.raises(BadInput, match="proportional"):
        inverse_frequencies({"rope_type": "proportional", "rope_theta": 1e4}, WIDTH)
    with pytest.raises(BadInput, match="factor is missing"):
        rotation_scale({"rope_type": "longrope", "rope_theta": 1e4})
    with pytest.raises(BadInput, match="original_max_position_embeddings is missing"):
        longest_text({"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}, 4096)


def test_a_factor_left_to_the_reader_is_the_ratio_of_the_lengths() -> None:
    """As Phi-3 writes it: the original length at the top, and no factor."""
    factors = {"short_factor": [1.1] * (WIDTH // 2), "long_factor": [9.0] * (WIDTH // 2)}
    rope, _ = normalise_rope(
        {
            "rope_theta": 50000.0,
            "rope_scaling": {"type": "longrope", **factors},
            "max_position_embeddings": LONGEST,
            "original_max_position_embeddings": 1024,
        },
        "config.json",
    )
    assert rope["factor"] == 4.0
    said = {"rope_type": "longrope", "rope_theta": 50000.0, "original_max_position_embeddings": 1024, **factors}
    config = LlamaConfig(
        hidden_size=2 * WIDTH, num_attention_heads=2, max_position_embeddings=LONGEST, rope_parameters=said
    )
    assert LlamaRotaryEmbedding(config).attention_scaling == pytest.approx(rotation_scale(rope))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"factor": "32"}, "factor of rope is '32', not a number from"),
        ({"beta_fast": -2}, "beta_fast of rope is -2"),
        ({"beta_slow": 1e308}, "beta_slow of rope is 1e\\+308"),
        ({"mscale": "much"}, "mscale of rope is 'much'"),
        ({"attention_factor": True}, "attention_factor of rope is True"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings of rope is 1"),
        ({"short_factor": ["a"]}, "short_factor of rope is \\['a'\\], not a list of positive numbers"),
        ({"long_factor": 3.0}, "long_factor of rope is 3.0"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0, not a number above 1"),
    ],
)
def test_a_number_that_cannot_be_meant_is_named(changes: dict[str, Any], said: str) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    with pytest.raises(BadInput, match=f"^config.json: {said}"):
        normalise_rope({"rope_parameters": rope | changes}, "config.json")


def test_heads_of_odd_width_are_refused() -> None:
    with pytest.raises(BadInput, match="head_dim 5 is odd"):
        inverse_frequencies({"rope_type": "default", "rope_theta": 1e4}, 5)
