"""What is taken for an EAGLE-3 drafter by mistake, named for what it is. Standard library only."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_EAGLE_1 = "an EAGLE-1 or EAGLE-2 head, which takes one state of the verifier: train an EAGLE-3 drafter in its place"
_MEDUSA = "Medusa heads: train an EAGLE-3 drafter in their place"
_MTP = "a multi-token-prediction (MTP) head, which servers take from the verifier itself"
_PARALLEL = "a P-EAGLE drafter, which drafts all tokens at once: vLLM serves it, Eyas knows those that draft one by one"
_DFLASH = "a DFlash drafter, which drafts blocks by diffusion"
LORA = "a LoRA adapter: merge it into its model first (merge_and_unload of peft)"

_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"p_?eagle", _PARALLEL),
    (r"medusa", _MEDUSA),
    (r"mtp|nextn", _MTP),
    (r"dflash", _DFLASH),
    (r"dspark", "a DSpark drafter"),
    (r"domino", "a Domino drafter"),
    (r"mlp_?speculator", "an MLP speculator"),
    (r"eagle(?!_?3)", _EAGLE_1),
)
"""Part of what an architecture or a kind of speculator is called, in lower case -> what it is."""

_BY_KEY = {"medusa_num_heads": _MEDUSA, "dflash_config": _DFLASH, "peft_type": LORA}

_BY_TENSOR: tuple[tuple[str, str], ...] = (
    (r".*\.lora_[AB]\..*", LORA),
    (r"(.*\.)?(eh_proj|enorm|hnorm)\.weight|(model\.)?mtp\..*", _MTP),
    (r"(medusa_heads?\.)?\d+\.\d+\.(linear\.)?weight", _MEDUSA),
    (r"(.*\.)?mask_hidden", _PARALLEL),
)

ADAPTER_CONFIG = "adapter_config.json"


def kind_by_names(names: Sequence[str]) -> str | None:
    """What architectures, or the kind of a speculator, are called after where that is no EAGLE-3 drafter."""
    for name in names:
        for pattern, kind in _BY_NAME:
            if re.search(pattern, name.lower()):
                return f"{kind} ({name})"
    return None


def kind_by_config(config: Mapping[str, Any]) -> str | None:
    """What other keys of a config say it is; None where they say nothing."""
    if found := next((key for key in _BY_KEY if key in config), None):
        return f"{_BY_KEY[found]} ({found})"
    layers = config.get("num_hidden_layers")
    if "text_config" in config or (type(layers) is int and layers > 1):
        return f"a whole language model, as a verifier is ({config.get('model_type')})"
    return None


def kind_by_tensors(shapes: Mapping[str, Sequence[int]]) -> str | None:
    """What tensors of these names and shapes belong to, with one of them; None where nothing is told by them."""
    for pattern, kind in _BY_TENSOR:
        if found := next(filter(re.compile(pattern).fullmatch, sorted(shapes)), None):
            return f"{kind} ({found})"
    fc = next((shapes[name] for name in ("fc.weight", "model.fc.weight") if name in shapes), ())
    if len(fc) == 2 and fc[1] == 2 * fc[0] and not any("hidden_norm" in name for name in shapes):
        return f"{_EAGLE_1} (fc.weight {list(fc)}, and no hidden_norm)"
    return None
