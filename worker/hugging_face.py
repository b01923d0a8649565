"""The one place that touches transformers: tokenizers with a chat template, and verifiers.

Nothing is fetched. Code of a verifier's directory is run only when the request says so; see worker/remote_code.py.
Weights are read from safetensors alone, never from a pickle.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers
from torch import Tensor, nn

from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.contract.tensor_names import EMBEDDING, FINAL_NORM, QUANTISED_SUFFIXES, Role
from eagle3_core.data.conversations import Message
from eagle3_core.errors import BadData, BadInput
from worker.remote_code import MODEL_CONFIGS, TOKENIZER_CONFIGS, refuse_code

transformers.utils.logging.disable_progress_bar()

BUILT_AS = {"kimi_k2": "deepseek_v3"}
"""model_types transformers knows by another name, so that their code need not be run. Source: Kimi_K25Config of
transformers 5.19.0, which builds its text model so."""

LAYERS = Role("layers", "model.layers", ("layers",), frozenset())

REWINDABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layer whose cache is one entry a token."""


class HuggingFaceTokenizer:
    """A `ChatTokenizer` over a tokenizer directory."""

    def __init__(self, directory: Path, allow_remote_code: bool = False) -> None:
        """Load.

        Raises:
            BadInput: the directory holds no fast tokenizer, or one without a chat template, or one that is code of its
                own, which was not allowed.
        """
        try:
            self.inner = transformers.AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=allow_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            refuse_code(directory, TOKENIZER_CONFIGS, allow_remote_code)
            raise BadInput(f"{directory}: no tokenizer could be loaded ({error})") from error
        if not self.inner.is_fast:
            raise BadInput(f"{directory}: the tokenizer gives no character offsets; a tokenizer.json is needed")
        if self.inner.chat_template is None:
            raise BadInput(f"{directory}: the tokenizer has no chat template (chat_template.jinja)")

    def render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        """The text of a conversation.

        Raises:
            BadData: the template refuses it, by its own word or by stumbling over it.
        """
        try:
            text = self.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadData(f"the verifier's chat template refuses this conversation: {error}") from error
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and character offsets; no special tokens are added."""
        encoded = self.inner(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, control tokens included."""
        text = self.inner.decode(ids)
        assert isinstance(text, str)
        return text

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all control tokens: the declared ones and every added token marked special."""
        added = {i for i, token in self.inner.added_tokens_decoder.items() if token.special}
        return frozenset(added | set(self.inner.all_special_ids))

    @property
    def kept_ids(self) -> frozenset[int]:
        """Ids a drafter must be able to propose whatever the data says: end of text and turn, think tags."""
        markers = {"<think>", "</think>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|return|>"}
        vocabulary = self.inner.get_vocab()
        return frozenset({vocabulary[marker] for marker in markers if marker in vocabulary} | self.stop_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The token that ends a text, if there is one."""
        eos = self.inner.eos_token_id
        return frozenset() if eos is None else frozenset({eos})


def load_model(directory: Path, device: torch.device, dtype: torch.dtype, allow_remote_code: bool = False) -> nn.Module:
    """A verifier in evaluation mode, on its device. Of a multi-modal one all of it is loaded; only text is run.

    Raises:
        BadInput: transformers cannot build it without running code of its own, or tensors are missing.
    """
    try:
        config = _model_config(directory, allow_remote_code)
        brought = allow_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        known = brought or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        family = transformers.AutoModelForCausalLM if known else transformers.AutoModelForImageTextToText
        # A pair, since the loading info is asked for.
        pair: tuple[nn.Module, dict[str, Any]] = family.from_pretrained(  # type: ignore[assignment]
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=allow_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, KeyError) as error:
        refuse_code(directory, MODEL_CONFIGS, allow_remote_code)
        raise BadInput(f"{directory}: the verifier could not be loaded ({error})") from error
    except ImportError as error:  # a quantised verifier needs the package of its scheme
        raise BadInput(f"{directory}: the worker's environment lacks what this verifier needs: {error}") from error
    model, info = pair
    _check_all_scales_used(directory, info["unexpected_keys"])
    # transformers fills what it does not find, or what does not fit, with random numbers and only warns.
    misfits = [f"{name} is {list(found)}, not {list(wanted)}" for name, found, wanted in info["mismatched_keys"]]
    if wrong := sorted([*(f"{name} is missing" for name in info["missing_keys"]), *misfits]):
        raise BadInput(f"{directory}: {len(wrong)} tensors of the verifier do not fit: {'; '.join(wrong[:4])}")
    return model.to(device).eval().requires_grad_(False)


def _check_all_scales_used(directory: Path, unexpected: Iterable[str]) -> None:
    """Refuse quantised weights whose scales were left out: transformers takes their codes for weights then.

    Raises:
        BadInput: names one.
    """
    unused = set(unexpected)
    for name in sorted(unused):
        for suffix, scheme in QUANTISED_SUFFIXES:
            weight = f"{name.removesuffix(suffix)}.weight"
            if name.endswith(suffix) and weight not in unused:
                raise BadInput(
                    f"{directory}: {name} was not used: {weight} is quantised ({scheme}) in a way transformers does "
                    "not know, and its codes would be taken for weights; give a verifier in bf16"
                )


def _model_config(directory: Path, allow_remote_code: bool) -> Any:
    """The config of a verifier; BUILT_AS applies where no code of its own may be run."""
    stated = read_json_object(directory / "config.json")
    known_as = BUILT_AS.get(str(stated.get("model_type")))
    if known_as is not None and not allow_remote_code:
        kept = {key: value for key, value in stated.items() if key not in ("model_type", "auto_map")}
        return transformers.AutoConfig.for_model(known_as, **kept)
    return transformers.AutoConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=allow_remote_code
    )


def backbone(model: nn.Module) -> nn.Module:
    """The decoder without its head: the module that holds the token embedding, the layers and the final norm.

    Raises:
        BadInput: there is none.
    """
    for _, module in model.named_modules():
        layers, norm, embedding = (part_of(module, role) for role in (LAYERS, FINAL_NORM, EMBEDDING))
        # A vision tower has layers and a norm as well, and what it calls embeddings are patches.
        if isinstance(layers, nn.ModuleList) and norm is not None and isinstance(embedding, nn.Embedding):
            return module
    raise BadInput(
        f"{type(model).__name__}: no decoder with an embedding, `layers` and a final norm was found, so that no states "
        "can be captured"
    )


def part_of(decoder: nn.Module, role: Role) -> nn.Module | None:
    """The module that plays a role in a decoder, by whatever name it goes."""
    children = dict(decoder.named_children())
    return next((children[leaf] for leaf in role.leaves if leaf in children), None)


def entering(layer_id: int, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    """The residual stream [B, T, H] among what a layer was called with.

    Raises:
        BadInput: there are several streams.
    """
    value = args[0] if args else kwargs["hidden_states"]
    assert isinstance(value, Tensor)
    if value.dim() != 3:
        raise BadInput(
            f"what enters layer {layer_id} has shape {list(value.shape)}: several residual streams, from which no "
            "drafter is fed"
        )
    return value


@contextlib.contextmanager
def capture_states(model: nn.Module, layer_ids: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Collect the residual stream entering the wanted layers, and what enters the final norm, of each forward pass.

    Args:
        model: what `load_model` gave.
        layer_ids: id k is the stream entering layer k; N is the one behind the last layer, before the final norm.

    Yields:
        id -> [B, T, H] of the latest forward pass.
    """
    decoder = backbone(model)
    layers, norm = part_of(decoder, LAYERS), part_of(decoder, FINAL_NORM)
    assert isinstance(layers, nn.ModuleList) and norm is not None
    states: dict[int, Tensor] = {}

    def keep(layer_id: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        states[layer_id] = entering(layer_id, args, kwargs)

    handles = []
    for layer_id in layer_ids:
        module = norm if layer_id == len(layers) else layers[layer_id]
        handles.append(
            module.register_forward_pre_hook(
                lambda _module, args, kwargs, layer_id=layer_id: keep(layer_id, args, kwargs), with_kwargs=True
            )
        )
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


class HuggingFaceSession:
    """A `VerifierSession` over a loaded verifier, with its key-value cache."""

    def __init__(self, model: nn.Module, aux_layer_ids: tuple[int, ...], states: dict[int, Tensor]) -> None:
        """Start an empty text.

        Args:
            model: what `load_model` gave.
            aux_layer_ids: the states to hand out, in this order.
            states: what `capture_states` yields for these ids.

        Raises:
            BadInput: a hybrid verifier, whose recurrent states cannot be taken back.
        """
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind not in REWINDABLE_LAYERS}
        if kinds:
            raise BadInput(
                f"{type(model).__name__} has layers of the kind {', '.join(sorted(kinds))}: draft tokens that were "
                "not accepted cannot be taken back from them here, so that it cannot be decoded with a drafter"
            )
        self._model, self._aux_layer_ids, self._states = model, aux_layer_ids, states
        self._device = next(model.parameters()).device
        self._cache = transformers.DynamicCache()

    def extend(self, ids: list[int]) -> tuple[list[int], Tensor]:
        """Greedy next token behind each, and their aux states [n, A, H]."""
        output = self._model(
            input_ids=torch.tensor([ids], device=self._device), past_key_values=self._cache, use_cache=True
        )
        aux = torch.stack([self._states[layer_id][0] for layer_id in self._aux_layer_ids], dim=1)
        return output.logits[0].argmax(-1).tolist(), aux

    def rewind(self, count: int) -> None:
        """Forget the last tokens."""
        if count:
            self._cache.crop(-count)
