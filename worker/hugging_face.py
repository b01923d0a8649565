"""The one place that touches transformers: tokenizers with a chat template, and verifiers.

Nothing is fetched. Code of a verifier's directory is run only when the request says so; see worker/remote_code.py.
Weights are read from safetensors alone, never from a pickle.
"""

import contextlib
import functools
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
import torch
import transformers
from torch import Tensor, nn
from transformers.utils.chat_template_utils import render_jinja_template

from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.contract.tensor_names import EMBEDDING, FINAL_NORM, QUANTISED_SUFFIXES, Role
from eagle3_core.data.conversations import Conversation
from eagle3_core.data.spans import TEMPLATE_REFUSES
from eagle3_core.data.tokens import Encoded, Spelled
from eagle3_core.errors import BadInput, BadRow
from worker.remote_code import MODEL_CONFIGS, TOKENIZER_CONFIGS, refuse_code

transformers.utils.logging.disable_progress_bar()

BUILT_AS = {"kimi_k2": "deepseek_v3"}
"""model_types transformers knows by another name, so that their code need not be run. Source: Kimi_K25Config of
transformers 5.19.0, which builds its text model so."""

LAYERS = Role("layers", "model.layers", ("layers",), frozenset())

REWINDABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layer whose cache is one entry a token."""

THINK_TAGS = ("<think>", "</think>")
END_MARKERS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|call|>")
"""Control tokens that end a turn wherever they exist; configs name but some of them."""

LONGEST_CHARACTER = 16
"""Tokens that may make up one character, or one cluster a decoder hands out whole."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class HuggingFaceTokenizer:
    """A `ChatTokenizer` over a tokenizer directory."""

    def __init__(self, directory: Path, allow_remote_code: bool = False, eos_token_ids: Iterable[int] = ()) -> None:
        """Load.

        Args:
            directory: holds tokenizer.json, or a tokenizer in Python.
            allow_remote_code: run that Python.
            eos_token_ids: further tokens that end a text, as the verifier's configs say.

        Raises:
            BadInput: no tokenizer could be loaded, or only one that is code of its own, which was not allowed.
        """
        self.directory = directory
        try:
            self.inner = transformers.AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=allow_remote_code
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            refuse_code(directory, TOKENIZER_CONFIGS, allow_remote_code)
            raise BadInput(f"{directory}: no tokenizer could be loaded ({error})") from error
        except ImportError as error:
            raise BadInput(f"{directory}: the tokenizer needs a package that is missing ({error})") from error
        except Exception as error:
            if type(error) is not Exception:  # the one class that tokenizers has for what it cannot read
                raise
            raise BadInput(
                f"{directory}/tokenizer.json: tokenizers {tokenizers.__version__} cannot read it ({error}); "
                "where a newer version wrote it, install that one"
            ) from error
        if self.inner.is_fast:
            self.inner.backend_tokenizer.no_truncation()
            self.inner.backend_tokenizer.no_padding()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._pieces: dict[int, str] = {}

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Raises:
            BadRow: the template refuses it, by its own word or by stumbling over it.
            BadInput: there is no template, or none that is the default.
        """
        self._template(conversation)
        tools: Any = conversation.tools
        try:
            text = self.inner.apply_chat_template(
                conversation.messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except _TEMPLATE_ERRORS as error:
            raise _refused(error) from error
        assert isinstance(text, str)
        return text

    def render_tracked(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]] | None:
        """The text and its `{% generation %}` blocks; None where the template has none.

        Raises:
            BadRow: the template refuses it.
            BadInput: there is no template, or none that is the default.
        """
        template = self._template(conversation)
        if not _GENERATION.search(template):
            return None
        special: dict[str, Any] = self.inner.special_tokens_map
        tools: Any = conversation.tools
        try:
            # A pair of lists, since the blocks are asked for.
            rendered: Any = render_jinja_template(
                [conversation.messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **special,
            )
        except _TEMPLATE_ERRORS as error:
            raise _refused(error) from error
        return rendered[0][0], rendered[1][0]

    def _template(self, conversation: Conversation) -> str:
        """The chat template: where there are several, the default one, or the one for tools."""
        if self.inner.chat_template is None:
            raise BadInput(f"{self.directory}: the tokenizer has no chat template (chat_template.jinja)")
        tools: Any = conversation.tools
        try:
            template = self.inner.get_chat_template(tools=tools)
        except ValueError as error:
            raise BadInput(f"{self.directory}: no chat template is the default one: {error}") from error
        assert isinstance(template, str)
        return template

    @property
    def writes_date(self) -> bool:
        """Whether the chat template asks what day it is."""
        return "strftime_now(" in str(self.inner.chat_template)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Encoded | BadRow]:
        """Token ids and character offsets of each text, or why there are none; no special tokens are added."""
        if self.inner.is_fast:
            return self.inner.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [self._spelled(text) for text in texts]

    def _spelled(self, text: str) -> Spelled | BadRow:
        """Tokens of a tokenizer that tells no offsets: each piece is looked up in the text it must spell.

        Tokens that hold parts of a character are taken together up to where the character is whole.
        """
        ids = self.encode(text)
        offsets: list[tuple[int, int]] = []
        place = 0
        while len(offsets) < len(ids):
            first = len(offsets)
            for behind in range(first + 1, min(len(ids), first + LONGEST_CHARACTER) + 1):
                piece = self._piece(ids[first]) if behind == first + 1 else self.decode(ids[first:behind])
                if text.startswith(piece, place) and piece and not self._goes_on(ids[first : behind + 1], piece):
                    break
            else:
                return BadRow(
                    "no_offsets",
                    "the tokenizer gives no character offsets, and its tokens do not spell the text: "
                    f"{self._piece(ids[first])!r} stands for {text[place : place + 10]!r}; a "
                    "tokenizer.json is needed",
                )
            offsets += [(place, place + len(piece))] * (behind - first)
            place += len(piece)
        return Spelled(ids, offsets)

    def _piece(self, token: int) -> str:
        """The text of one token; decoding in Python is slow, and most tokens come again."""
        if token not in self._pieces:
            self._pieces[token] = self.decode([token])
        return self._pieces[token]

    def _goes_on(self, ids: list[int], piece: str) -> bool:
        """Whether a replacement character is that of the text, but not whole before the last of these tokens."""
        return piece.endswith("\ufffd") and self.decode(ids[:-1]) == piece == self.decode(ids)

    def encode(self, text: str) -> list[int]:
        """Token ids; no special tokens are added."""
        ids = self.inner(text, add_special_tokens=False)["input_ids"]
        assert isinstance(ids, list)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, control tokens included."""
        text = self.inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def decode_batch(self, rows: Sequence[list[int]]) -> list[str]:
        """The text of each row of token ids, control tokens included."""
        if self.inner.is_fast:
            texts: list[str] = self.inner.backend_tokenizer.decode_batch(list(rows), skip_special_tokens=False)
            return texts
        return [self.decode(row) for row in rows]

    @functools.cached_property
    def special_texts(self) -> frozenset[str]:
        """Texts that are one token each, whatever stands around them: control tokens, tags."""
        return frozenset(token.content for token in self.inner.added_tokens_decoder.values())

    @functools.cached_property
    def stop_texts(self) -> frozenset[str]:
        """Those of them that end a turn or a text."""
        added = self.inner.added_tokens_decoder
        named = {added[token].content for token in self.stop_ids if token in added}
        return frozenset(named | (self.special_texts & set(END_MARKERS)))

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all control tokens: the declared ones and every added token marked special."""
        added = {i for i, token in self.inner.added_tokens_decoder.items() if token.special}
        return frozenset(added | set(self.inner.all_special_ids))

    @functools.cached_property
    def kept_ids(self) -> frozenset[int]:
        """Ids a drafter must be able to propose whatever the data says: end of text and turn, think tags."""
        vocabulary = self.inner.get_vocab()
        return frozenset(
            {vocabulary[text] for text in (*THINK_TAGS, *END_MARKERS) if text in vocabulary} | self.stop_ids
        )

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of texts that are one token each."""
        ids: Any = self.inner.convert_tokens_to_ids(list(texts))
        return frozenset(ids)

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a text."""
        eos = self.inner.eos_token_id
        return self._eos_token_ids if eos is None else self._eos_token_ids | {eos}


def _refused(error: Exception) -> BadRow:
    return BadRow(TEMPLATE_REFUSES, f"the verifier's chat template refuses this conversation: {error}")


def load_model(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    allow_remote_code: bool = False,
    device_map: str | None = None,
) -> nn.Module:
    """A verifier in evaluation mode, on its device. Of a multi-modal one all of it is loaded; only text is run.

    Args:
        directory: of the verifier.
        device: where it is put, all of it.
        dtype: of its weights.
        allow_remote_code: whether code of its own may be run.
        device_map: how accelerate spreads it over all GPUs instead; its layers bring their inputs over by themselves.

    Raises:
        BadInput: transformers cannot build it without running code of its own, or tensors are missing.
    """
    try:
        config = _model_config(directory, allow_remote_code)
        importlib.invalidate_caches()  # code copied within a clock tick of the last look is not seen otherwise
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
            device_map=device_map,
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
    return (model if device_map else model.to(device)).eval().requires_grad_(False)


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
