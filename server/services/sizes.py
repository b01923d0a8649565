"""How many bytes a job will write, from the headers of what its parameters name. No tensor is read."""

from pathlib import Path

from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.headers import read_header
from eagle3_core.contract.params import (
    ConvertParams,
    ExternalParams,
    ExtractParams,
    PrepareParams,
    StageParams,
    TrainParams,
)
from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.contract.weight_files import read_weight_files
from eagle3_core.errors import BadInput
from server.domain.space import SMALL, DrafterSize, Need, extract_need, prepare_need, size_of, train_need
from server.services.models import read_verifier

DEFAULT_AUX_STATES = 3


def need_of(params: StageParams) -> Need:
    """What a job with these parameters will write, as far as it can be told by now."""
    try:
        match params:
            case PrepareParams():
                size = Path(params.conversations).stat().st_size
                need = prepare_need(size, read_verifier(Path(params.verifier)).vocab_size)
            case ExtractParams():
                need = _extract(params)
            case TrainParams():
                need = _train(params)
            case ConvertParams():
                need = _convert(params)
            case ExternalParams():
                need = Need(None, "what a program writes is its own affair")
            case _:
                need = Need(SMALL, "a report")
    except (ValueError, OSError, KeyError, IndexError) as error:  # reported where it is refused
        return Need(None, f"not known before its inputs are there: {error}")
    return need


def _extract(params: ExtractParams) -> Need:
    rows = read_header(Path(params.prepared_dir) / "rows.safetensors").tensors
    hidden = read_verifier(Path(params.verifier)).hidden_size
    aux = len(params.aux_layer_ids) if params.aux_layer_ids else DEFAULT_AUX_STATES
    return extract_need(params, rows["input_ids"].shape[0], rows["offsets"].shape[0] - 1, aux, hidden)


def _train(params: TrainParams) -> Need:
    return train_need(params, drafter_of(params, read_verifier(Path(params.verifier)))[1])


def _convert(params: ConvertParams) -> Need:
    """The weights once more, and what the verifier lends a checkpoint that has no embedding or head."""
    files = read_weight_files(Path(params.checkpoint))
    size = sum(located.info.end - located.info.start for located in files.tensors.values())
    names = {name.removeprefix("model.") for name in files.tensors}
    if params.verifier is not None and not names >= {"embed_tokens.weight", "lm_head.weight"}:
        verifier = read_verifier(Path(params.verifier))
        size += 2 * (verifier.embedding.info.end - verifier.embedding.info.start)
    return Need(size, f"the tensors of {params.checkpoint}")


def drafter_of(params: TrainParams, files: VerifierFiles) -> tuple[DrafterConfig, DrafterSize]:
    """The drafter a training will hold, as far as it decides what it takes.

    Raises:
        ValueError, OSError, KeyError, IndexError: what it depends on is not there, or not what it should be.
    """
    source = None if params.finetune_from is None else _of_source(params.finetune_from, params, files)
    config = _fresh(params, files)
    return config, source or size_of(config)


def _of_source(path: str, params: TrainParams, files: VerifierFiles) -> DrafterSize | None:
    """By the tensors of the checkpoint it starts from; None where that holds no safetensors."""
    try:
        tensors = read_weight_files(Path(path)).tensors
    except BadInput:
        return None
    counts = [
        located.info.count
        for name, located in tensors.items()
        if name.removesuffix(".weight").rpartition(".")[2] not in ("embed_tokens", "lm_head", "d2t", "t2d")
    ]
    draft = next((located.info.count for name, located in tensors.items() if name.endswith("d2t")), files.vocab_size)
    draft = _draft_vocab_size(params) or draft
    return DrafterSize(files.vocab_size, draft, files.hidden_size, sum(counts), len(counts) + 1)


def _fresh(params: TrainParams, files: VerifierFiles) -> DrafterConfig:
    """A new drafter, as far as it decides what a checkpoint takes; flags add a few rows at most."""
    return DrafterConfig(
        hidden_size=files.hidden_size,
        intermediate_size=params.intermediate_size or files.intermediate_size,
        num_attention_heads=params.num_attention_heads or files.num_attention_heads,
        num_key_value_heads=params.num_key_value_heads or files.num_key_value_heads,
        head_dim=params.head_dim or files.head_dim,
        vocab_size=files.vocab_size,
        draft_vocab_size=_draft_vocab_size(params) or files.vocab_size,
        aux_layer_ids=None,
        num_aux_states=len(params.aux_layer_ids) if params.aux_layer_ids else DEFAULT_AUX_STATES,
        rope={},
        mla=files.mla if params.mla else None,
    )


def _draft_vocab_size(params: TrainParams) -> int | None:
    """As asked for, else as the vocabulary map has it."""
    if params.draft_vocab_size is not None or params.vocab_map_dir is None:
        return params.draft_vocab_size
    return read_header(Path(params.vocab_map_dir) / "vocab_map.safetensors").tensors["d2t"].shape[0]
