"""Small files of every kind: safetensors byte by byte, verifiers and drafters a few kB large."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_core.checkpoint.format import write_checkpoint
from eagle3_core.contract.drafter_config import DrafterConfig, expected_tensors

H, V, D, LAYERS = 16, 64, 24, 8

VERIFIER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

DRAFTER = DrafterConfig(
    hidden_size=H,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=V,
    draft_vocab_size=D,
    aux_layer_ids=(2, 4, 5),
    rope={"rope_type": "default", "rope_theta": 500000.0},
    eos_token_id=2,
)


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file of any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def verifier_tensors(prefix: str = "model.", head: str | None = "lm_head.weight") -> dict[str, Tensor]:
    tensors = {f"{prefix}embed_tokens.weight": random(V, H), f"{prefix}norm.weight": torch.ones(H).bfloat16()}
    if head is not None:
        tensors[head] = random(V, H, seed=1)
    return tensors


def write_config(directory: Path, config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_verifier(
    directory: Path, tensors: dict[str, Tensor] | None = None, config: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """A verifier of one file; `changes` go into its config, None takes a key out."""
    merged = {**(VERIFIER if config is None else config), **changes}
    write_config(directory, {key: value for key, value in merged.items() if value is not None})
    save_file(verifier_tensors() if tensors is None else tensors, directory / "model.safetensors")
    return directory


def write_shards(directory: Path, shards: list[dict[str, Tensor]]) -> dict[str, str]:
    """Shards and their index; returns the weight map."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def write_kimi_like(directory: Path, shards: int = 6) -> Path:
    """The layout of Kimi-K2.5 in int4: a multi-modal wrapper, latent attention, packed experts, many shards."""
    text = {
        **{key: value for key, value in VERIFIER.items() if key not in ("architectures", "tie_word_embeddings")},
        "model_type": "kimi_k2",
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "moe_intermediate_size": 12,
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64, "mscale": 1.0},
        "quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head"]},
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"hidden_size": 8},
    }
    write_config(directory, config)
    pieces: list[dict[str, Tensor]] = []
    for index in range(shards):
        layer = f"language_model.model.layers.{index}."
        expert = f"{layer}mlp.experts.0.down_proj."
        pieces.append(
            {
                f"{expert}weight_packed": torch.zeros(H, 2, dtype=torch.int32),
                f"{expert}weight_scale": random(H, 1),
                f"{expert}weight_shape": torch.tensor([H, 12]),
                f"{layer}self_attn.q_a_proj.weight": random(8, H),
                f"{layer}self_attn.q_a_layernorm.weight": torch.ones(8).bfloat16(),
                f"{layer}input_layernorm.weight": torch.ones(H).bfloat16(),
            }
        )
    outer = verifier_tensors("language_model.model.", "language_model.lm_head.weight")
    pieces[0]["vision_tower.patch_embed.proj.weight"] = random(8, 3)
    pieces[0]["language_model.model.embed_tokens.weight"] = outer["language_model.model.embed_tokens.weight"]
    pieces[-1] |= {name: tensor for name, tensor in outer.items() if "embed" not in name}
    write_shards(directory, pieces)
    return directory


def draft_ids() -> Tensor:
    """Ascending verifier tokens of the draft vocabulary; 0 is not among them."""
    return (torch.randperm(V - 1, generator=torch.Generator().manual_seed(7))[:D] + 1).sort().values


def drafter_tensors(config: DrafterConfig = DRAFTER, seed: int = 3) -> dict[str, Tensor]:
    """Every tensor of a sound drafter; the embedding is that of `verifier_tensors`."""
    tensors: dict[str, Tensor] = {}
    for number, (name, (shape, kind)) in enumerate(expected_tensors(config).items()):
        if kind == "float":
            tensors[name] = random(*shape, seed=seed + number) if len(shape) > 1 else torch.ones(shape).bfloat16()
    tensors["embed_tokens.weight"] = random(V, H)
    if config.draft_vocab_size < config.vocab_size:
        tensors["d2t"] = draft_ids() - torch.arange(D)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool)
        tensors["t2d"][draft_ids()] = True
    return tensors


def optimizer_state(tensors: dict[str, Tensor], steps: int = 1) -> dict[str, Any]:
    """State of a real AdamW over all but the embedding."""
    named = [
        (name, torch.nn.Parameter(tensor.float()))
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and name != "embed_tokens.weight"
    ]
    optimizer = torch.optim.AdamW(named, lr=1e-3)
    for _ in range(steps):
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return dict(optimizer.state_dict())


def write_drafter(
    parent: Path,
    epoch: int = 0,
    config: DrafterConfig = DRAFTER,
    tensors: dict[str, Tensor] | None = None,
    optimizer: dict[str, Any] | None = None,
    steps: int = 1,
    extra: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint as training writes it."""
    parent.mkdir(parents=True, exist_ok=True)
    tensors = drafter_tensors(config) if tensors is None else tensors
    return write_checkpoint(
        parent,
        str(epoch),
        epoch=epoch,
        config=config,
        tensors=tensors,
        optimizer_state=optimizer_state(tensors, steps) if optimizer is None else optimizer,
        scheduler_state={"last_epoch": steps},
        verifier_name="verifier",
        verifier_architectures=["LlamaForCausalLM"],
        speculative_tokens=3,
        step=steps,
        extra=extra or {},
    )
