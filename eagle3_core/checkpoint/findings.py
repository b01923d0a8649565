"""What the judge can find, and what follows from it.

    any error                     invalid
    else any warning              suspect
    else                          valid        (info changes nothing)
    no weights could be read      unreadable

docs/findings.md explains every code: what it means, why it matters, how to fix it.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from eagle3_core.contract.plain import plain

Severity = Literal["error", "warning", "info"]
VerdictWord = Literal["valid", "suspect", "invalid", "unreadable"]
Level = Literal["quick", "full", "deep"]
Server = Literal["speculators", "vllm-v1", "vllm-v2", "sglang"]
Effect = Literal["refuses", "loads_wrongly", "note"]
Outcome = Literal["loads", "loads_wrongly", "refuses"]
Proof = Literal["provoked", "source"]

_NAMED = 3
_MOST_OF_A_CODE = 200
"""Findings of one code that are listed; a file of another model can bring any number."""

CODES: dict[str, tuple[Severity, str]] = {
    # the directory
    "no_checkpoint": (
        "error",
        "Give a checkpoint directory, an output directory with 0/, 1/ ..., or a .safetensors file.",
    ),
    "latest_judged": ("info", ""),
    "not_a_drafter": ("info", "Ask for `expect_drafter` where it should be one."),
    "other_model": ("error", "Give an EAGLE-3 drafter: no other kind is judged, converted or trained on."),
    "missing_file": ("error", "Copy the checkpoint again, all files of it."),
    "size_differs": ("error", "Copy the checkpoint again; if the source is the same, take another epoch."),
    "digest_differs": ("error", "The bytes changed after writing: copy again, and check the disk if it happens twice."),
    "rewritten": ("info", ""),
    "config_edited": ("error", "Put the value back, unless you mean it: then write the checkpoint anew."),
    "manifest_absent": ("info", "Without a manifest a changed byte cannot be told from a trained one."),
    "manifest_broken": ("error", "Copy manifest.json again from where the checkpoint was written."),
    "unlisted_file": ("info", ""),
    "stray_weights": ("warning", "Move it away: vLLM and SGLang load every .safetensors file, the last one wins."),
    "index_differs": ("warning", "Write the index anew: programs differ in whether they load what it leaves out."),
    "custom_code": ("info", "It was not executed. Servers do not need it."),
    # the weight file
    "truncated_file": ("error", "Copy the file again; if it was written so, the disk was full or the writer died."),
    "damaged_header": ("error", "Copy the file again, or take another epoch."),
    "trailing_bytes": ("error", "Copy the file again; strict readers refuse it."),
    "lfs_pointer": ("error", "Run `git lfs pull` in the repository it came from."),
    "unsafe_pickle": (
        "error",
        "Nothing was executed. Ask for the file as safetensors, or as a state dict of tensors only.",
    ),
    "damaged_pickle": ("error", "Copy the file again, or take another epoch."),
    "legacy_pickle": ("error", "Load it with torch.load(weights_only=True) and save it again with torch.save."),
    "checksum_differs": ("error", "Copy the file again, or take another epoch."),
    "wrong_format": ("error", "Convert the weights to safetensors."),
    "name_clash": ("error", "Keep one of the two names; servers take whichever comes last."),
    # config.json
    "bad_config": ("error", "Correct the named key in config.json."),
    "unsupported_part": ("warning", "This part was not judged."),
    "config_note": ("info", ""),
    "tied_head": ("error", "Write tie_word_embeddings: false; the drafter has a head of its own."),
    "flag_not_stated": ("warning", "Write the flag into config.json, as the drafter was trained."),
    "aux_ids_not_stated": ("info", "Write eagle_aux_hidden_state_layer_ids; servers guess [2, N//2, N-3]."),
    "aux_ids_off_by_one": ("warning", "Write the ids of the captured states: 3, N//2+1, N-2 for the 0.3 default."),
    "aux_id_count": ("error", "List as many ids as fc.weight takes states."),
    "aux_ids_twice": ("error", "Each state once; servers drop doubles and fc no longer fits."),
    "aux_ids_not_ascending": ("error", "Servers feed the states in ascending order, whatever the list says."),
    "aux_id_out_of_range": ("error", "Ids go from 0 to the verifier's number of layers."),
    "verifier_differs": ("error", "The drafter belongs to another verifier, or config.json is wrong."),
    "positions_short": ("warning", "Write the verifier's max_position_embeddings, unless it is served with less."),
    "quantised_config": ("warning", "Remove quantization_config: it was copied from the verifier."),
    "not_served": ("warning", "Do what `--servers` says, or convert it."),
    "verifier_unreadable": ("warning", "Give the verifier's directory; what needs it was not judged."),
    # names and shapes
    "missing_tensor": ("error", "Servers start without it and draft with random or zero weights."),
    "unexpected_tensor": ("error", "Remove it: vLLM refuses names it does not know, SGLang drops them in silence."),
    "flag_without_tensor": ("error", "Set the flag as the drafter was trained, or restore the tensor."),
    "tensor_without_flag": ("error", "Set the flag as the drafter was trained: servers ignore the tensor without it."),
    "shape_differs": ("error", "Config and tensors come from different drafters, or the named key is wrong."),
    "dtype_differs": ("error", "Store weights as bf16, f16 or f32, d2t as int64 and t2d as bool."),
    "embedding_absent": ("info", "Servers share the verifier's embedding."),
    "head_absent": (
        "warning",
        "vLLM borrows the verifier's head when the vocabulary is full; SGLang drafts with a random one.",
    ),
    "t2d_absent": ("info", "Servers do not read t2d; training resumes from d2t."),
    # values
    "not_finite": ("error", "The run diverged or the file is damaged: take an earlier epoch."),
    "all_zero": ("warning", "A tensor of zeros was not trained, or was lost in conversion."),
    "constant": ("warning", "A matrix of one value was not trained, or was lost in conversion."),
    "zero_rows": ("warning", "Rows of zeros were not trained, or were lost in conversion."),
    "duplicate_rows": ("warning", "Rows that are the same were not trained, or were shifted in conversion."),
    "duplicate_embedding_rows": ("info", "Usual for tokens the verifier never saw in training."),
    "zero_embedding_rows": ("info", "Usual for padding tokens."),
    "extreme_values": ("warning", "A flipped exponent bit looks like this; so does a run that is about to diverge."),
    # vocabulary map
    "d2t_absolute": ("error", "Subtract the draft index: d2t[i] = target id - i."),
    "d2t_out_of_range": ("error", "d2t belongs to another verifier or is damaged."),
    "d2t_duplicates": ("error", "Each draft id must stand for a token of its own."),
    "d2t_not_ascending": ("warning", "The speculators format keeps draft ids in the order of target ids."),
    "d2t_order": ("info", "Fine for servers: the format this comes from orders by frequency."),
    "t2d_count": ("error", "t2d must be true at exactly draft_vocab_size tokens."),
    "d2t_t2d_differ": ("error", "Take d2t and t2d from the same map, the one lm_head was trained with."),
    "identity_slice": ("error", "The map was never filled in: the drafter can only propose the first ids."),
    "map_length": ("error", "Take d2t from the map lm_head was trained with; a builder pads short maps."),
    # optimizer and schedule
    "optimizer_absent": ("info", "Training cannot be resumed from here."),
    "optimizer_layout": ("warning", "Written by an optimizer the judge does not know."),
    "optimizer_mismatch": (
        "error",
        "The optimizer state belongs to another drafter or epoch: resume from another checkpoint.",
    ),
    "optimizer_incomplete": ("warning", "Parameters without state start again from zero moments when resumed."),
    "optimizer_stale": ("warning", "The optimizer state was written at another step than the weights."),
    "scheduler_layout": ("warning", "The learning rate cannot be resumed from it."),
    # against the epoch before
    "previous_unreadable": ("warning", "Give a readable checkpoint; nothing was compared."),
    "weights_unchanged": (
        "warning",
        "Training did not move the weights: learning rate, frozen parameters or a stale copy.",
    ),
    "tensor_unchanged": ("info", "Small steps vanish in bf16; look again after the next epoch."),
    "map_changed": ("error", "Head rows keep the meaning of the old map: use the map of the checkpoint trained from."),
    "frozen_tensor_changed": ("warning", "The embedding is frozen in training; a change comes from somewhere else."),
    "tensors_swapped": ("error", "Put each tensor back under its own name, or take another epoch."),
    "matrix_replaced": ("warning", "Look where it was lost: rows in another order, a transposition, another's tensor."),
    "unlike_previous": ("info", "Usual after a long epoch at a high learning rate; else the tensor was replaced."),
    "distribution_shift": ("warning", "The run is about to diverge, or the tensor was scaled or replaced."),
    "config_changed": ("warning", "Both checkpoints should come from one run."),
    # against the verifier
    "own_embedding": ("info", "Serve it with vLLM: SGLang puts the verifier's embedding in its place."),
    "embedding_differs": ("warning", "Servers may replace it by the verifier's: export the frozen embedding."),
    "head_rows_differ": ("warning", "Take lm_head and d2t from one export: a shifted or permuted map looks like this."),
    # the forward pass
    "store_unreadable": ("error", "Give a hidden-state store of this drafter's verifier."),
    "no_forward_pass": ("warning", "Train or evaluate it with the program it comes from."),
    "loss_not_finite": ("error", "The drafter cannot be run: take an earlier epoch."),
    "worse_than_chance": ("warning", "Weights, map, norm flags or layer ids are not those it was trained with."),
    "training_disagrees": ("error", "Weights, flags or data are not those the recorded loss was measured with."),
    "resume_fails": ("error", "Resume from another checkpoint, or start with fresh optimizer state."),
    "measured": ("info", ""),
    # hidden states
    "no_store": ("error", "Give the output directory of an extract job, or a directory of hs_<row>.safetensors."),
    "unfinished_store": ("error", "Run the extraction again with the same output directory: it goes on."),
    "bad_index": ("error", "Copy index.json again, or extract again."),
    "shard_differs": ("error", "Extract again: the shard is not what the index says."),
    "bad_layer_ids": ("error", "Extract again, with aux_layer_ids that ascend."),
    "last_state_early": ("error", "Targets come from the state behind the last layer: extract again."),
    "row_twice": ("error", "Extract again: the index lists a row more than once."),
    "rows_overlap": ("error", "Extract again: rows of the index do not lie one behind the other."),
    "rows_missing": ("warning", "Extract again with the same output directory: only what is missing is made."),
    "rows_unreadable": ("warning", "Give the output of a prepare job, or rows with input_ids and loss_mask as JSON."),
    "other_verifier": ("error", "Extract with this verifier, or train with the one the states are of."),
    "other_tokenizer": ("error", "Prepare and extract again with one tokenizer."),
    "states_not_finite": ("error", "Extract the row again; if it stays, run the verifier in bfloat16 or float32."),
    "states_all_zero": ("error", "The verifier did not fill them: extract the row again."),
    "states_zero": ("error", "The verifier did not fill them: extract the row again."),
    "bad_scale": ("error", "Extract again: the scales of the eight-bit states are damaged."),
    "states_of_other_row": ("error", "Two rows were mixed up in extraction: extract them again, one at a time."),
    "norm_mislabelled": ("error", "Write what they are into index.json (last_state), or extract again."),
    "norm_mixed": ("error", "Extract all rows anew, in one way: no head fits both."),
    "states_shifted": ("error", "States and token ids are out of step: extract again, and look at how rows were cut."),
    "unlike_other_rows": ("warning", "The states are of other tokens, or the row is no text: extract the row again."),
    "slots_alike": ("warning", "One layer was captured twice: look at the layer ids of the extraction."),
    "tokens_alike": ("warning", "A buffer was written twice: extract the row again."),
    "slots_differ": ("error", "Extract again with one choice of layers, the last state behind them."),
    "lengths_differ": ("error", "Extract the row again, without prefix caching and speculation."),
    "ids_differ": ("error", "The states belong to other tokens: extract the row again."),
    "ids_out_of_range": ("error", "The row was made with another tokenizer, or is damaged."),
    "mask_differs": ("error", "The row was prepared in another way: extract again from this preparation."),
    "bad_mask": ("error", "Extract again: the mask is damaged."),
    "nothing_supervised": ("error", "Nothing can be learnt: look at the chat template and prepare again."),
    "no_answer": ("warning", "Rows without an answer are skipped in training: look at how they were prepared."),
    "all_supervised": ("warning", "Prompts are learnt like answers: look at the chat template and prepare again."),
    "rows_alike": ("info", "Doubled rows count doubly in training."),
    "meaning_unsaid": ("info", "Write down how they were extracted; --verifier tells of the norm."),
    "being_written": ("warning", "Wait until its writer is done, and judge again."),
    "orphan_lock": ("info", "It may be removed."),
}
"""Code -> severity and what to do. Stable: tools rely on the codes."""


@dataclass(frozen=True)
class Finding:
    """One fault, or one thing worth knowing. `file` is relative to the judged path; '' means the whole of it."""

    code: str
    severity: Severity
    file: str
    tensor: str | None
    message: str
    hint: str

    def to_dict(self) -> dict[str, Any]:
        """As in JSON output and events."""
        return asdict(self)


@dataclass(frozen=True)
class Reason:
    """A rule of a server that applies: what about this checkpoint, where the rule comes from, and what to do."""

    rule: str
    effect: Effect
    message: str
    fix: str
    source: str
    proof: Proof


@dataclass(frozen=True)
class Servability:
    """What one server, of one version, would do with a drafter."""

    server: Server
    version: str
    outcome: Outcome
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Verdict:
    """The judge's word, and why; `servers` is empty where there is no drafter to serve."""

    verdict: VerdictWord
    findings: list[Finding]
    level: Level = "full"
    servers: tuple[Servability, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """`{"verdict", "level", "findings": [...], "servers": [...]}`."""
        return {
            "verdict": self.verdict,
            "level": self.level,
            "findings": [finding.to_dict() for finding in self.findings],
            "servers": [asdict(server) for server in self.servers],
        }

    @property
    def usable(self) -> bool:
        """Neither invalid nor unreadable."""
        return self.verdict in ("valid", "suspect")

    def errors(self) -> str:
        """The first errors in one line, each with its file."""
        found = [finding for finding in self.findings if finding.severity == "error"]
        named = "; ".join(f"{one.file}: {one.message}" if one.file else one.message for one in found[:_NAMED])
        return named + (f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


@dataclass
class Report:
    """Collects findings while a checkpoint is judged."""

    root: Path
    findings: list[Finding] = field(default_factory=list)
    unreadable: bool = False
    servers: tuple[Servability, ...] = ()
    _told: Counter[str] = field(default_factory=Counter)

    def add(self, code: str, message: str, *, file: Path | str = "", tensor: str | None = None) -> None:
        """Note a finding. Its severity and hint follow from the code."""
        severity, hint = CODES[code]
        self._told[code] += 1
        if self._told[code] <= _MOST_OF_A_CODE:
            named = None if tensor is None else plain(tensor)
            self.findings.append(Finding(code, severity, plain(self._relative(file)), named, plain(message), hint))

    def verdict(self, level: Level) -> Verdict:
        """The word that follows, the gravest findings first."""
        order = {"error": 0, "warning": 1, "info": 2}
        left = {code: count - _MOST_OF_A_CODE for code, count in self._told.items() if count > _MOST_OF_A_CODE}
        more = [Finding(code, CODES[code][0], "", None, f"{left[code]:,} more like these", "") for code in left]
        findings = sorted([*self.findings, *more], key=lambda finding: order[finding.severity])
        gravest = findings[0].severity if findings else "info"
        word: VerdictWord = "invalid" if gravest == "error" else "suspect" if gravest == "warning" else "valid"
        return Verdict("unreadable" if self.unreadable else word, findings, level, self.servers)

    def has(self, code: str) -> bool:
        """Whether something was found."""
        return any(finding.code == code for finding in self.findings)

    def _relative(self, file: Path | str) -> str:
        if isinstance(file, Path):
            base = self.root if self.root.is_dir() else self.root.parent
            name = file.relative_to(base).as_posix() if file.is_relative_to(base) else str(file)
            return "" if name == "." else name
        return file
