"""Contradictions between verifier, data and drafter that would make a job fail or its training pointless.

certain    the stage would refuse them: so does the request     from the same rules, eagle3_core/contract/agreement.py
doubtful   the stage would warn of them, or say nothing at all  a dry run tells them

Only configs, indexes, headers and row offsets are read. What is not there yet is judged by the parameters of the job of
the same request that will make it.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from eagle3_core.contract import agreement
from eagle3_core.contract.drafter_files import DrafterSource, read_drafter_config
from eagle3_core.contract.headers import read_header
from eagle3_core.contract.params import EvaluateParams, ExtractParams, PrepareParams, StageParams, TrainParams
from eagle3_core.contract.prepared_files import MANIFEST, load_manifest
from eagle3_core.contract.store_files import INDEX, StoreIndex, read_index
from eagle3_core.contract.verifier_files import (
    VerifierFiles,
    config_fingerprint,
    tokenizer_fingerprint,
)
from eagle3_core.errors import Eagle3Error
from server.errors import FieldError
from server.services.models import read_verifier
from server.services.paths import resolve

MAX_INDEX_BYTES = 64 << 20
"""A larger index, of about half a million rows, is left to the stage."""


@dataclass(frozen=True)
class Doubt:
    """Something that is worth a word. `pointer` into the request."""

    pointer: str
    code: str
    message: str


@dataclass
class Findings:
    """What was found of one job."""

    pointer: str
    certain: list[FieldError] = field(default_factory=list)
    doubtful: list[Doubt] = field(default_factory=list)

    def doubt(self, name: str, code: str, message: str) -> None:
        """Note a doubt about a parameter."""
        self.doubtful.append(Doubt(f"{self.pointer}/{name}", code, message))

    def refuse(self, name: str, message: str) -> None:
        """Note a fault of a parameter."""
        self.certain.append(FieldError(f"{self.pointer}/{name}", message))

    def check(self, name: str, rule: Callable[[], object]) -> bool:
        """Apply a rule that raises where it is broken; what cannot be read is a fault as well."""
        try:
            rule()
        except Eagle3Error as error:
            self.refuse(name, str(error))
        except OSError as error:
            self.refuse(name, f"cannot be read: {error}")
        else:
            return True
        return False


Makers = Mapping[Path, StageParams]
"""Output directory -> parameters of the job of the same request that will write it."""


def find_conflicts(params: StageParams, pointer: str, makers: Makers) -> Findings:
    """What contradicts what. The verifier itself was looked at before."""
    found = Findings(pointer)
    match params:
        case ExtractParams():
            _extract(params, makers, found)
        case TrainParams():
            _train(params, makers, found)
        case EvaluateParams():
            _evaluate(params, makers, found)
        case _:
            pass
    return found


def _verifier(path: str) -> VerifierFiles | None:
    """None where it is not there, or was found faulty before."""
    try:
        return read_verifier(Path(path))
    except (Eagle3Error, OSError):
        return None


def _maker(path: str | None, makers: Makers) -> StageParams | None:
    """The parameters of the job that will make a path."""
    if path is None:
        return None
    return next((params for directory, params in makers.items() if resolve(path).is_relative_to(directory)), None)


def _extract(params: ExtractParams, makers: Makers, found: Findings) -> None:
    files = _verifier(params.verifier)
    if files is None:
        return
    found.check("aux_layer_ids", lambda: agreement.chosen_layers(params, files))
    prepared = Path(params.prepared_dir)
    if prepared.exists():
        found.check("prepared_dir", lambda: _check_prepared(params, files, prepared))
    elif isinstance(made := _maker(params.prepared_dir, makers), PrepareParams):
        _same_tokenizer(made.verifier, params.verifier, found)
        if made.max_seq_len > files.max_position_embeddings:
            found.doubt(
                "prepared_dir",
                "rows_too_long",
                f"rows of up to {made.max_seq_len} tokens are prepared, the verifier is made for "
                f"{files.max_position_embeddings}; one longer than that is refused",
            )


def _check_prepared(params: ExtractParams, files: VerifierFiles, prepared: Path) -> None:
    agreement.check_prepared(params, files, load_manifest(prepared), max(row_lengths(prepared), default=0))


def row_lengths(prepared: Path) -> list[int]:
    """Tokens of each row of a prepared directory.

    Raises:
        UnreadableFile: rows.safetensors is not what it should be.
        OSError: it cannot be read.
    """
    header = read_header(prepared / "rows.safetensors")
    place = header.tensors.get("offsets")
    if place is None or place.dtype != "I64":
        return []
    offsets = array("q")
    with header.path.open("rb") as file:
        file.seek(place.start)
        offsets.frombytes(file.read(place.end - place.start))
    return [end - start for start, end in pairwise(offsets)]


def _same_tokenizer(made_with: str, used_with: str, found: Findings) -> None:
    try:
        same = tokenizer_fingerprint(Path(made_with)) == tokenizer_fingerprint(Path(used_with))
    except (Eagle3Error, OSError):
        return
    if not same:
        text = f"the rows are prepared with the tokenizer of {made_with}, which is not that of {used_with}"
        found.refuse("prepared_dir", f"{text}; prepare with this verifier")


def _train(params: TrainParams, makers: Makers, found: Findings) -> None:
    files = _verifier(params.verifier)
    if files is None:
        return
    index = _store(params, files, found) if Path(params.data_dir).exists() else None
    if index is None and isinstance(made := _maker(params.data_dir, makers), ExtractParams):
        _planned_store(params, files, made, makers, found)
    _vocabulary(params, files, index, makers, found)
    if params.finetune_from is not None and Path(params.finetune_from).exists():
        _source(params, params.finetune_from, index, found)


def _store(params: TrainParams, files: VerifierFiles, found: Findings) -> StoreIndex | None:
    directory = Path(params.data_dir)
    read: list[StoreIndex] = []
    if is_too_large(directory):
        text = f"{directory / INDEX} is too large to be looked at before the job runs"
        found.doubt("data_dir", "not_looked_at", text)
        return None
    if not found.check("data_dir", lambda: read.append(read_index(directory))):
        return None
    meta = read[0].meta
    found.check("data_dir", lambda: agreement.check_store(params, files, meta))
    found.check("aux_layer_ids", lambda: agreement.check_layers(params, meta))
    _shards(directory, read[0], found)
    try:
        if meta.config_fingerprint != config_fingerprint(files.path):
            text = f"was extracted from {meta.verifier}, whose config is not that of {params.verifier}"
            found.doubt("data_dir", "verifier_differs", text)
    except (Eagle3Error, OSError):
        pass  # said of the verifier
    _lengths(params, read[0], found)
    return read[0]


def is_too_large(store: Path) -> bool:
    """Whether the index of a store is left to the stage."""
    index = store / INDEX
    return index.is_file() and index.stat().st_size > MAX_INDEX_BYTES


def _shards(directory: Path, index: StoreIndex, found: Findings) -> None:
    """The first shard that is missing or has another size than the index says."""
    for shard in index.shards:
        try:
            size = (directory / Path(shard.file).name).stat().st_size
        except OSError as error:
            found.refuse(
                "data_dir", f"{directory / shard.file}: {error.strerror}, though {INDEX} lists it; extract again"
            )
            return
        if size != shard.bytes:
            text = f"{directory / shard.file} has {size} bytes, {INDEX} says {shard.bytes}; extract again"
            found.refuse("data_dir", text)
            return


def _lengths(params: TrainParams, index: StoreIndex, found: Findings) -> None:
    lengths = [row.length for shard in index.shards for row in shard.rows]
    longest, cut = max(lengths), [length for length in lengths if length > params.max_seq_len]
    at_longest = lengths.count(longest)
    if cut:
        lost = sum(cut) - params.max_seq_len * len(cut)
        text = f"{len(cut)} of {len(lengths)} rows are longer than {params.max_seq_len}: {lost:,} tokens are left out"
        found.doubt("max_seq_len", "rows_cut", text)
    elif longest < params.max_seq_len and at_longest > max(1, len(lengths) // 20):
        text = (
            f"{at_longest} of {len(lengths)} rows have exactly {longest} tokens and none has more: they were cut there "
            f"when they were prepared, and max_seq_len {params.max_seq_len} cannot bring the rest back"
        )
        found.doubt("max_seq_len", "rows_were_cut", text)
    if params.val_ratio and len({row.prompt for shard in index.shards for row in shard.rows}) == 1:
        found.doubt("val_ratio", "no_validation", "the data holds a single prompt: nothing is left to validate on")


def _planned_store(
    params: TrainParams, files: VerifierFiles, made: ExtractParams, makers: Makers, found: Findings
) -> None:
    """Compare with an extraction that has not run."""
    theirs = _verifier(made.verifier)
    if theirs is None:
        return
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if vars(theirs)[name] != vars(files)[name]:
            had, has = vars(theirs)[name], vars(files)[name]
            found.refuse("data_dir", f"is extracted from {made.verifier} with {name} {had}, the verifier has {has}")
            return
    try:
        if config_fingerprint(theirs.path) != config_fingerprint(files.path):
            text = f"is extracted from {made.verifier}, whose config is not that of {params.verifier}"
            found.doubt("data_dir", "verifier_differs", text)
        layers = agreement.chosen_layers(made, theirs)
    except (Eagle3Error, OSError):
        return  # said of the extraction
    if params.aux_layer_ids is not None and params.aux_layer_ids != layers:
        text = f"{list(params.aux_layer_ids)} are asked for, {list(layers)} are extracted; leave aux_layer_ids out"
        found.refuse("aux_layer_ids", text)
    prepared = _maker(made.prepared_dir, makers)
    if isinstance(prepared, PrepareParams) and prepared.max_seq_len < params.max_seq_len:
        text = f"rows are cut at {prepared.max_seq_len} tokens by prepare: {params.max_seq_len} changes nothing"
        found.doubt("max_seq_len", "rows_were_cut", text)
    elif isinstance(prepared, PrepareParams) and prepared.max_seq_len > params.max_seq_len:
        text = f"rows of up to {prepared.max_seq_len} tokens are extracted, and cut at {params.max_seq_len}"
        found.doubt("max_seq_len", "rows_cut", text)


def _vocabulary(
    params: TrainParams, files: VerifierFiles, index: StoreIndex | None, makers: Makers, found: Findings
) -> None:
    if params.vocab_map_dir is None:
        return
    directory = Path(params.vocab_map_dir)
    if directory.exists():
        found.check("vocab_map_dir", lambda: _check_map(params, files, directory))
        if index is not None and (directory / MANIFEST).is_file():
            try:
                manifest = load_manifest(directory)
            except (Eagle3Error, OSError):
                return
            if manifest.tokenizer_fingerprint != index.meta.tokenizer_fingerprint:
                text = (
                    f"was prepared with the tokenizer of {manifest.verifier}, data_dir with that of "
                    f"{index.meta.verifier}: its draft ids may stand for other tokens"
                )
                found.doubt("vocab_map_dir", "vocabulary_map_differs", text)
    elif isinstance(made := _maker(params.vocab_map_dir, makers), PrepareParams):
        theirs = _verifier(made.verifier)
        if theirs is not None:
            found.check(
                "vocab_map_dir", lambda: agreement.check_map(params, files, made.draft_vocab_size, theirs.vocab_size)
            )


def _check_map(params: TrainParams, files: VerifierFiles, directory: Path) -> None:
    sizes = {name: info.count for name, info in read_header(directory / "vocab_map.safetensors").tensors.items()}
    if "d2t" in sizes and "t2d" in sizes:
        agreement.check_map(params, files, sizes["d2t"], sizes["t2d"])


def _source(params: TrainParams, path: str, index: StoreIndex | None, found: Findings) -> None:
    read: list[DrafterSource] = []
    if not found.check("finetune_from", lambda: read.append(read_drafter_config(Path(path)))) or index is None:
        return
    overridden: list[str] = []
    meta = index.meta
    found.check("finetune_from", lambda: agreement.shape_of_source(params, meta, read[0], overridden))
    for text in overridden:
        found.doubt("finetune_from", "source_mismatch_allowed", text)


def _evaluate(params: EvaluateParams, makers: Makers, found: Findings) -> None:
    files = _verifier(params.verifier)
    if files is not None and Path(params.checkpoint).exists():
        read: list[DrafterSource] = []
        if found.check("checkpoint", lambda: read.append(read_drafter_config(Path(params.checkpoint)))):
            config = read[0].config
            if config.hidden_size != files.hidden_size:
                text = f"has hidden size {config.hidden_size}, the verifier's states have {files.hidden_size}"
                found.refuse("checkpoint", text)
            if config.aux_layer_ids is None:
                found.refuse("checkpoint", "its config.json states no aux layer ids, so its states are unknown")
    learned = [made.conversations for made in makers.values() if isinstance(made, PrepareParams)]
    if any(resolve(params.prompts) == resolve(path) for path in learned):
        text = "these are the conversations the drafter is trained on: what it learned by heart counts as skill"
        found.doubt("prompts", "prompts_were_trained_on", text)
