"""Runs inside SpecForge's own venv: what its drafter misses in a checkpoint, and what it does not know, as JSON.

usage: python specforge_loads_driver.py CHECKPOINT
"""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"
warnings.simplefilter("ignore")

from safetensors.torch import load_file  # noqa: E402
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from transformers import AutoConfig  # noqa: E402

path = Path(sys.argv[1])
drafter = LlamaForCausalLMEagle3(AutoConfig.from_pretrained(path), attention_backend="sdpa")
missing, unexpected = drafter.load_state_dict(load_file(path / "model.safetensors"), strict=False)
print(json.dumps({"missing": missing, "unexpected": unexpected}))
