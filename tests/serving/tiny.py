"""Tiny models that vLLM runs on a CPU: a verifier, and drafters of every make in every format, right or changed."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_core.checkpoint.convert import convert
from eagle3_core.checkpoint.findings import Servability
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.drafter_config import DrafterConfig, expected_tensors
from tests.judging import WEIGHTS
from tests.makers import write_drafter
from tests.serving.cases import Case

SPREAD = 0.15
"""Of random weights: enough for every part to matter in the argmax."""

VERIFIER = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=512,
    initializer_range=SPREAD,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
DRAFTER = DrafterConfig(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=512,
    draft_vocab_size=200,
    aux_layer_ids=(2, 4, 5),
    rope={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=512,
)


def write_verifier(directory: Path, **changes: Any) -> Path:
    """A Llama of eight layers with random weights, in bfloat16 as drafters are stored."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(VERIFIER.to_dict() | changes))).bfloat16().save_pretrained(directory)
    return directory


def drafter_tensors(config: DrafterConfig, verifier: Path) -> dict[str, Tensor]:
    """Random weights, those of norms and biases too; the embedding is the verifier's, unless it was trained."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, (shape, kind) in expected_tensors(config).items():
        if kind == "float":
            values = torch.randn(shape, generator=generator)
            tensors[name] = 1 + 0.5 * values if name.endswith("norm.weight") else SPREAD * values
    if not config.own_embedding:
        tensors["embed_tokens.weight"] = load_file(verifier / WEIGHTS)["model.embed_tokens.weight"]
    if config.draft_vocab_size < config.vocab_size:
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return tensors


def write_tiny(parent: Path, verifier: Path, **changes: Any) -> Path:
    """A checkpoint in the speculators format, as training writes it, of a drafter of any make."""
    config = DrafterConfig.model_validate(DRAFTER.model_dump() | changes)
    return write_drafter(parent, config=config, tensors=drafter_tensors(config, verifier))


def laid_out(case: Case, source: Path, path: Path, verifier: Path) -> Path:
    """The drafter in the case's format, changed as it says."""
    convert(source, path, case.target, verifier=verifier)
    (path / "manifest.json").unlink()
    settings = json.loads((path / "config.json").read_text())
    case.edit(settings)
    (path / "config.json").write_text(json.dumps(settings))
    tensors = load_file(path / WEIGHTS)
    case.change(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


def judged(path: Path, verifier: Path, runner: str) -> Servability:
    """What the rules say of one of vLLM's model runners."""
    return next(one for one in judge(path, verifier=verifier).servers if one.server == f"vllm-{runner}")
