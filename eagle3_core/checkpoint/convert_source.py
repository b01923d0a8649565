"""What a checkpoint means, whatever format it is in: read for conversion and comparison, or refused.

D draft vocabulary, V verifier vocabulary, A aux states, N the verifier's decoder layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_core.checkpoint.config_styles import Parts
from eagle3_core.checkpoint.findings import Finding, Report
from eagle3_core.checkpoint.judge_map import read_offsets
from eagle3_core.checkpoint.judge_verifier import VerifierParts
from eagle3_core.checkpoint.layer_ids import States
from eagle3_core.checkpoint.quick import Inspected, inspect
from eagle3_core.checkpoint.serving_facts import Facts, facts_of
from eagle3_core.checkpoint.weights import DrafterWeights
from eagle3_core.contract.drafter_files import DrafterSource
from eagle3_core.errors import CheckpointError

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Meaning:
    """A drafter that can be written anew.

    path: the directory that was read.
    targets: verifier token of each draft id, in the order of the rows of lm_head.
    states: what it was trained on; None: not stated, so that servers take 2, N//2, N-3.
    family: the verifier's, empty where it is not known.
    notes: decisions made in reading.
    """

    path: Path
    source: DrafterSource
    weights: DrafterWeights
    verifier: VerifierParts | None
    targets: Sequence[int]
    states: States | None
    family: str
    notes: list[str] = field(default_factory=list)

    @property
    def layers(self) -> int | None:
        """N, where the verifier is known."""
        return None if self.verifier is None else self.verifier.config.num_hidden_layers

    @property
    def parts(self) -> Parts:
        """What its DrafterConfig does not say."""
        wide = self.source.target_hidden_size
        return Parts(
            target_hidden_size=wide if wide != self.source.config.hidden_size else None,
            fc_bias="fc_bias" in self.source.extras,
            mlp_bias="mlp_bias" in self.source.extras,
            dtype=DTYPES[self.weights.entries["fc.weight"].dtype],
        )


def read_meaning(
    path: Path,
    verifier: Path | None = None,
    aux_layer_ids: Sequence[int] | None = None,
    *,
    states_needed: bool = True,
) -> Meaning:
    """The drafter in a checkpoint of any format.

    Args:
        path: checkpoint directory, or an output directory, whose latest epoch is taken.
        verifier: its verifier, for what the checkpoint leaves to it.
        aux_layer_ids: the states it was trained on, where the checkpoint does not say it or can be read in two ways.
        states_needed: refuse one that was trained on other states than servers feed, and does not say on which.

    Raises:
        CheckpointError: it is damaged, incomplete, contradicts itself or `aux_layer_ids`, has parts that no other
            format knows, or can be read in two ways.
    """
    if path.is_file():
        raise CheckpointError(f"{path}: is a file; give the directory that holds it and config.json")
    report = Report(path)
    found = inspect(report, path, verifier, True)
    if faults := [finding for finding in report.findings if _spoils(finding, found)]:
        named = "; ".join(f"[{one.code}] {one.file + ': ' if one.file else ''}{one.message}" for one in faults[:3])
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"{path}: {named}{more}. {faults[0].hint}")
    assert found is not None and found.source is not None and found.weights is not None, "or there is an error"
    _refuse_what_is_unclear(found.path, found.source)
    facts = facts_of(found.source, found.weights, found.verifier, True, False)
    prefix = f"{found.path / 'config.json'}: "
    # What is said of layer ids and of the flag is decided here, or refused.
    told = (note.removeprefix(prefix) for note in found.source.notes if not note.startswith("norm_before_residual"))
    notes = [note for note in told if "layer_ids" not in note]
    states = _states(found.path, facts, None if aux_layer_ids is None else tuple(aux_layer_ids), notes)
    if states is None and found.source.captured_after and states_needed:
        raise CheckpointError(
            f"{found.path / 'config.json'}: written by speculators 0.3 without layer ids, and trained on states 3, "
            "N//2+1, N-2: give the verifier, or aux_layer_ids"
        )
    if found.source.raw.get("quantization_config") is not None:
        notes.append("quantization_config is left out: no tensor is quantised")
    if found.path != path:
        notes.insert(0, f"{found.path.name}/ is taken, the latest epoch")
    return Meaning(
        path=found.path,
        source=found.source,
        weights=found.weights,
        verifier=found.verifier,
        targets=_targets(found),
        states=states,
        family=facts.family,
        notes=notes,
    )


def _spoils(finding: Finding, found: Inspected | None) -> bool:
    """Whether a finding keeps a drafter from being read; one about optimizer or schedule does not."""
    if finding.code == "verifier_unreadable":
        return found is None or found.verifier is None  # its config is enough where nothing is taken from its weights
    if finding.severity != "error":
        return False
    if found is None or found.source is None or found.weights is None:
        return True
    config = found.source.config
    if finding.tensor in ("d2t", "t2d") and finding.code == "unexpected_tensor":
        return config.draft_vocab_size != config.vocab_size
    ours = {"", "config.json", "manifest.json", *(file.name for file in found.weights.files)}
    return Path(finding.file).name in ours


def _refuse_what_is_unclear(path: Path, source: DrafterSource) -> None:
    file = path / "config.json"
    if source.unjudged:
        raise CheckpointError(f"{file}: {'; '.join(source.unjudged)}: it cannot be converted")
    if source.tied:
        raise CheckpointError(
            f"{file}: tie_word_embeddings is true: SGLang takes the embedding for the head, vLLM does not. Write "
            "false, and ship lm_head.weight"
        )
    if source.format == "speculators" and source.raw.get("norm_before_residual") is None:
        raise CheckpointError(
            f"{file}: norm_before_residual is not stated: speculators reads false, vLLM true. Write the flag as the "
            "drafter was trained"
        )


def _targets(found: Inspected) -> Sequence[int]:
    assert found.source is not None and found.weights is not None
    d2t, size = found.weights.entries.get("d2t"), found.source.config.draft_vocab_size
    if size != found.source.config.vocab_size or d2t is None:
        assert found.targets is not None, "the map was found sound"
        return found.targets
    # A full vocabulary needs no map, yet speculators 0.3 wrote one.
    targets = [index + offset for index, offset in enumerate(read_offsets(d2t))] if d2t.dtype == "I64" else []
    if sorted(targets) != list(range(size)):
        raise CheckpointError(f"{d2t.file}: d2t of a full vocabulary does not lead to each of the {size} tokens once")
    return targets


def _states(path: Path, facts: Facts, given: States | None, notes: list[str]) -> States | None:
    """The states the drafter was trained on, as the checkpoint or the caller says."""
    file, source = path / "config.json", facts.source
    known, count = source.config.aux_layer_ids, source.config.num_aux_states
    if given is not None and (len(given) != count or list(given) != sorted(set(given)) or given[0] < 0):
        raise CheckpointError(f"{file}: aux_layer_ids {list(given)} are not {count} ascending states")
    if given is not None and facts.verifier is not None and given[-1] > facts.verifier.num_hidden_layers:
        raise CheckpointError(
            f"aux_layer_ids {list(given)}: the verifier has {facts.verifier.num_hidden_layers} layers"
        )
    if known is None:
        return _unstated(facts, given, notes)
    if facts.top_ids is None and facts.nested_ids is not None:
        return _nested(file, facts, known, facts.nested_ids, given, notes)
    if given not in (None, known):
        raise CheckpointError(f"{file}: says states {list(known)}, aux_layer_ids {list(given or ())}")
    return known


def _unstated(facts: Facts, given: States | None, notes: list[str]) -> States | None:
    """Where no ids stand: as given, else as its format means them, else as servers feed them to a known verifier."""
    meant = facts.trained_states or (None if facts.source.captured_after else facts.default_states)
    if given is not None:
        if meant not in (None, given):
            notes.append(f"states {list(given)} are taken, as given; servers would feed others by themselves")
        return given
    if meant is not None:
        notes.append(f"the layer ids are not stated: taken for {list(meant)}")
    elif not facts.source.captured_after:
        notes.append("the layer ids are not stated: servers take [2, N//2, N-3]")
    return meant


def _nested(
    file: Path, facts: Facts, known: States, ids: States, given: States | None, notes: list[str]
) -> States | None:
    """States of ids that stand in eagle_config alone, where vLLM and SGLang can read them differently."""
    readings = {ids, tuple(k + 1 for k in ids)}
    if given is not None:
        if given not in readings:
            raise CheckpointError(f"{file}: eagle_config says {list(ids)}, aux_layer_ids {list(given)}")
        return given
    served = facts.sglang_states()
    if served not in (None, known):
        raise CheckpointError(
            f"{file}: layer ids {list(ids)} in eagle_config alone: SGLang feeds states {list(served or ())} of this "
            f"verifier, vLLM's V1 runner {list(ids)}. Give aux_layer_ids, the states it was trained on"
        )
    notes.append(f"layer ids {list(ids)} in eagle_config are read as states {list(known)}")
    return known
