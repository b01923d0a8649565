"""The judge on a drafter beside its verifier: sizes, layer ids, positions. No tensor is read."""

from dataclasses import dataclass
from pathlib import Path

from eagle3_core.checkpoint.findings import Report
from eagle3_core.contract.drafter_files import DrafterSource
from eagle3_core.contract.tensor_names import EMBEDDING, HEAD
from eagle3_core.contract.verifier_config import VerifierConfig, read_verifier_config
from eagle3_core.contract.verifier_files import find_tensor
from eagle3_core.contract.weight_files import TensorLocation, WeightFiles, read_weight_files
from eagle3_core.errors import BadInput


@dataclass(frozen=True)
class VerifierParts:
    """What a drafter is compared with: the verifier's config, and embedding and head where they can be read."""

    config: VerifierConfig
    embedding: TensorLocation | None
    head: TensorLocation | None


def check_against_verifier(
    report: Report, directory: Path, source: DrafterSource, verifier: Path
) -> VerifierParts | None:
    """Sizes, layer ids and positions against those of the verifier; None where its config cannot be read."""
    try:
        config = read_verifier_config(verifier)
        positions = config.number("max_position_embeddings")
    except (BadInput, OSError) as error:
        report.add("verifier_unreadable", f"the verifier could not be read: {error}")
        return None
    embedding = head = None
    try:
        files = read_weight_files(verifier)
        embedding = find_tensor(EMBEDDING, files)
        head = embedding if config.tied else _head(files)
    except (BadInput, OSError) as error:
        report.add("verifier_unreadable", f"the verifier's weights could not be read: {error}")
    _compare_sizes(report, directory / "config.json", source, config, embedding)
    own = source.config.max_position_embeddings
    if positions is not None and own < positions:
        what = f"max_position_embeddings is {own}, the verifier's is {positions}"
        report.add("positions_short", what, file=directory / "config.json")
    return VerifierParts(config, embedding, head)


def _compare_sizes(
    report: Report, file: Path, source: DrafterSource, config: VerifierConfig, embedding: TensorLocation | None
) -> None:
    drafter, rows = source.config, None if embedding is None else embedding.info.shape[0]
    vocab_size = config.vocab_size or rows
    if vocab_size is not None and drafter.vocab_size not in (vocab_size, rows):
        report.add("verifier_differs", f"vocab_size is {drafter.vocab_size}, the verifier's is {vocab_size}", file=file)
    width = source.target_hidden_size or drafter.hidden_size
    if width != config.hidden_size:
        key = "target_hidden_size" if source.target_hidden_size else "hidden_size"
        report.add(
            "verifier_differs", f"{key} is {width}, the verifier's hidden_size is {config.hidden_size}", file=file
        )
    beyond = [index for index in drafter.aux_layer_ids or () if index > config.num_hidden_layers]
    if beyond:
        report.add(
            "aux_id_out_of_range",
            f"layer ids {beyond} are beyond the verifier's {config.num_hidden_layers} layers",
            file=file,
        )


def _head(files: WeightFiles) -> TensorLocation | None:
    """The head, unless it is quantised or missing: then it is compared with nothing."""
    try:
        return find_tensor(HEAD, files)
    except BadInput:
        return None
