"""prepare: conversations -> token ids, loss mask, token counts and the draft vocabulary.

rows are read -> rendered, a batch at a time -> tokenised and masked in a thread, while the next batch is rendered
-> written. Memory holds two batches, whatever the file's size.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_core.contract.jobdir import write_json
from eagle3_core.contract.params import PrepareParams
from eagle3_core.contract.prepared_files import PreparedManifest
from eagle3_core.contract.verifier_files import VerifierFiles, read_verifier_files, tokenizer_fingerprint
from eagle3_core.data.conversations import Conversation, Row, Tokenised
from eagle3_core.data.prepared import RowWriter, save_manifest
from eagle3_core.data.spans import Rendered, SpanFinder
from eagle3_core.data.tokens import ChatTokenizer, MaskedRow, mask_texts, render_rows
from eagle3_core.errors import BadData, BadRow
from eagle3_core.model.vocab_map import VocabMap, build_vocab_map, count_supervised, save_vocab_map
from worker.context import StageContext, StageResult
from worker.conversation_files import ConversationFile
from worker.hugging_face import HuggingFaceTokenizer
from worker.prepare_report import Report
from worker.progress import Progress
from worker.remote_code import report_code

LOW_COVERAGE = 0.8
BATCH_ROWS = 256
BATCH_CHARACTERS = 1_000_000
COUNTED_TOKENS = 1 << 20
"""Tokens that are counted at a time."""

REPORT = "report.json"

Numbered = tuple[int, MaskedRow | BadRow]
"""Line, and what became of it."""


def run(context: StageContext) -> StageResult:
    """Tokenise, mask, count, and write the files of the prepared directory."""
    params = context.params
    assert isinstance(params, PrepareParams)
    verifier = read_verifier_files(Path(params.verifier))
    for code, message in verifier.warnings:
        context.warn(code, message)

    context.phase("tokenising")
    if params.allow_remote_code:
        report_code(context, Path(params.verifier))
    tokenizer = HuggingFaceTokenizer(Path(params.verifier), params.allow_remote_code, verifier.eos_token_ids)
    if tokenizer.writes_date:
        context.warn("date_in_template", "the chat template writes the date: prepared on another day, rows are others")
    finder = SpanFinder(tokenizer)
    source = ConversationFile(Path(params.conversations))
    progress = Progress(context, source.size, source.unit)
    with RowWriter(context.output_dir) as writer:
        keeper = _Keeper(params, verifier, tokenizer, writer)
        for rows in masked_batches(source.rows(), finder, tokenizer):
            context.check_stop()
            tokens = writer.tokens
            keeper.take(rows)
            progress.go_to(min(source.position, source.size), writer.tokens - tokens)
        keeper.count()
        report = keeper.report
        _warn(context, report)
        if not report.rows_read:
            raise BadData(f"{params.conversations} holds no conversation")
        if not len(writer):
            left_out = report.dropped if report.dropped.total else report.damaged
            raise BadData(
                f"{params.conversations}: none of {report.rows_read} conversations has an answer to train on within "
                f"max_seq_len: {left_out.commonest()}"
            )
        context.phase("writing")
        special = _kept(tokenizer, finder, keeper.counts)
        vocab_map = build_vocab_map(keeper.counts, params.draft_vocab_size, special)
        writer.finish()
    return _write(context, params, keeper, vocab_map)


def masked_batches(
    rows: Iterable[tuple[int, Row | BadRow]], finder: SpanFinder, tokenizer: ChatTokenizer
) -> Iterator[list[Numbered]]:
    """The rows in their order, tokenised in batches.

    Raises:
        BadData: the file is damaged.
        BadInput: a conversation came, and the tokenizer has no chat template.
    """
    waiting: Future[list[Numbered]] | None = None
    with ThreadPoolExecutor(1, "tokenise") as pool:
        for batch in _batches(rows):
            lines = [line for line, _ in batch]
            rendered = render_rows(finder, [row for _, row in batch])
            coming = pool.submit(_masked, tokenizer, lines, rendered)
            if waiting is not None:
                yield waiting.result()
            waiting = coming
        if waiting is not None:
            yield waiting.result()


def _batches(rows: Iterable[tuple[int, Row | BadRow]]) -> Iterator[list[tuple[int, Row | BadRow]]]:
    batch: list[tuple[int, Row | BadRow]] = []
    size = 0
    for line, row in rows:
        batch.append((line, row))
        if isinstance(row, Conversation):
            size += sum(len(message["content"]) for message in row.messages)
        elif isinstance(row, Tokenised):
            size += 8 * len(row.token_ids)
        if len(batch) == BATCH_ROWS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _masked(tokenizer: ChatTokenizer, lines: list[int], rendered: Sequence[Rendered | Row | BadRow]) -> list[Numbered]:
    texts = iter(mask_texts(tokenizer, [one for one in rendered if isinstance(one, Rendered)]))
    found: list[Numbered] = []
    for line, one in zip(lines, rendered, strict=True):
        if isinstance(one, Tokenised):
            found.append((line, MaskedRow(one.token_ids, one.loss_mask)))
        else:
            assert not isinstance(one, Conversation)
            found.append((line, one if isinstance(one, BadRow) else next(texts)))
    return found


@dataclass
class _Keeper:
    """Sorts rows into those that are written and those that are left out, and counts."""

    params: PrepareParams
    verifier: VerifierFiles
    tokenizer: HuggingFaceTokenizer
    writer: RowWriter
    report: Report = field(default_factory=Report)
    lines: "array[int]" = field(default_factory=lambda: array("q"))
    prompts: list[str] = field(default_factory=list)
    supervised: int = 0

    def __post_init__(self) -> None:
        self.counts: Tensor = torch.zeros(self.verifier.vocab_size, dtype=torch.int64)
        bos = self.tokenizer.inner.bos_token_id if self.verifier.bos_token_id is None else self.verifier.bos_token_id
        self._doubled = [bos, bos]
        self._ids, self._mask = array("i"), bytearray()

    def take(self, rows: list[Numbered]) -> None:
        """Write what can be trained on, and note the rest.

        Raises:
            BadData: more lines are damaged than max_bad_rows; names the last one.
        """
        for line, found in rows:
            self.report.rows_read += 1
            row = self._checked(line, found)
            if row is not None:
                ids = array("i", row.token_ids)
                self.writer.add(ids, row.loss_mask)
                self.lines.append(line)
                self.prompts.append(row.prompt)
                self._ids += ids
                self._mask += row.loss_mask
        if len(self._ids) >= COUNTED_TOKENS:
            self.count()

    def count(self) -> None:
        """Add to the counts what was not counted yet."""
        if self._ids:
            ids = torch.frombuffer(self._ids, dtype=torch.int32)
            mask = torch.frombuffer(self._mask, dtype=torch.bool)
            self.supervised += count_supervised(self.counts, ids, mask)
            self._ids, self._mask = array("i"), bytearray()

    def _checked(self, line: int, row: MaskedRow | BadRow) -> MaskedRow | None:
        """The row as it is written, or None."""
        if isinstance(row, MaskedRow):
            row = within_vocabulary(row, len(self.counts))
        if isinstance(row, BadRow):
            self._leave_out(line, row)
            return None
        cut = row.cut(self.params.max_seq_len)
        if not cut.is_trainable:
            reason = "answer_cut_off" if row.is_trainable else "nothing_to_train"
            self.report.dropped.add(reason, line, f"{len(row.token_ids)} tokens, {sum(row.loss_mask)} to train on")
            return None
        self._note(line, row, cut)
        return cut

    def _leave_out(self, line: int, row: BadRow) -> None:
        if not row.damaged:
            self.report.dropped.add(row.reason, line, str(row))
            return
        self.report.damaged.add(row.reason, line, str(row))
        total, allowed = self.report.damaged.total, self.params.max_bad_rows
        if total > allowed:
            others = f"; {total} such lines so far" if total > 1 else ""
            raise BadRow(
                row.reason,
                f"{self.params.conversations}, line {line}: {row}{others} (mend it, or have up to max_bad_rows, "
                f"now {allowed}, such lines left out)",
            )

    def _note(self, line: int, row: MaskedRow, cut: MaskedRow) -> None:
        note, ids, mask = self.report.noted.add, cut.token_ids, cut.loss_mask
        if cut is not row:
            note("cut", line, f"{len(row.token_ids)} tokens, the last {len(row.token_ids) - len(ids)} are left out")
        if ids[:2] == self._doubled:
            note("doubled_bos", line, f"begins with token {ids[0]} twice: rendered, then tokenised with special tokens")
        if 0 not in mask:
            note("all_trained", line, "every token is trained on, also what was asked")
        if any(mask[at : at + 2] == b"\x01\x01" for stop in self.tokenizer.stop_ids for at in _places(ids, stop)):
            note("answer_goes_on_behind_its_end", line, "an answer holds the text of a token that ends it")


def within_vocabulary(row: MaskedRow, vocab_size: int) -> MaskedRow | BadRow:
    """The row, or what is wrong with it where a token of it is none of the verifier's."""
    highest = max(row.token_ids, default=0)
    if highest < vocab_size:
        return row
    text = f"token {highest}, the verifier's vocabulary ends at {vocab_size - 1}"
    return BadRow("token_outside_vocabulary", text, damaged=True)


def _places(token_ids: list[int], token: int) -> Iterator[int]:
    """Where a token stands."""
    at = -1
    for _ in range(token_ids.count(token)):
        at = token_ids.index(token, at + 1)
        yield at


def _warn(context: StageContext, report: Report) -> None:
    """Say what was left out, and what is odd in what was not."""
    said = {
        "answer_goes_on_behind_its_end": "hold the text of an end-of-turn token inside an answer, so that what stands "
        "behind it would never be said",
        "doubled_bos": "begin with the token that begins a text twice, as a served verifier never sees it",
        "all_trained": "have every token trained on, also what was asked",
    }
    for reason, words in said.items():
        if reason in report.noted.found:
            count = report.noted.found[reason]["count"]
            context.warn(reason, f"{count} conversations {words}: {report.noted.lines(reason)}")
    for tally in (report.dropped, report.damaged):
        for reason, count in tally.counts().items():
            text = f"{count} of {report.rows_read} conversations were left out: {tally.lines(reason)}"
            context.warn(f"rows_dropped_{reason}", f"{text}; {tally.example(reason)}")


def _kept(tokenizer: HuggingFaceTokenizer, finder: SpanFinder, counts: Tensor) -> frozenset[int]:
    """Tokens of the draft vocabulary whatever their count: what ends turns, think tags, control tokens in answers."""
    said = {token for token in tokenizer.special_ids if token < len(counts) and counts[token]}
    ends = tokenizer.ids_of(finder.ends) if finder.is_used else frozenset()
    return tokenizer.kept_ids | ends | said


def _write(context: StageContext, params: PrepareParams, keeper: _Keeper, vocab_map: VocabMap) -> StageResult:
    report, rows = keeper.report, len(keeper.writer)
    if vocab_map.coverage < LOW_COVERAGE:
        context.warn(
            "low_coverage",
            f"the draft vocabulary of {params.draft_vocab_size} covers {vocab_map.coverage:.1%} of what is supervised: "
            "the drafter cannot propose the rest; raise draft_vocab_size",
        )
    dropped = {"nothing_to_train": 0, "answer_cut_off": 0, **report.dropped.counts(), **report.damaged.counts()}
    manifest = PreparedManifest(
        verifier=params.verifier,
        tokenizer_fingerprint=tokenizer_fingerprint(Path(params.verifier)),
        conversations=params.conversations,
        max_seq_len=params.max_seq_len,
        draft_vocab_size=params.draft_vocab_size,
        tokens=keeper.writer.tokens,
        supervised_tokens=keeper.supervised,
        vocab_coverage=round(vocab_map.coverage, 6),
        dropped=dropped,
        lines=keeper.lines.tolist(),
        prompts=keeper.prompts,
    )
    save_vocab_map(context.output_dir, vocab_map)
    write_json(context.output_dir / REPORT, report.to_dict(rows))
    save_manifest(context.output_dir, manifest)
    data: dict[str, Any] = {
        "rows": rows,
        "tokens": manifest.tokens,
        "supervised_tokens": manifest.supervised_tokens,
        "draft_vocab_size": params.draft_vocab_size,
        "vocab_coverage": manifest.vocab_coverage,
        "dropped": dropped,
        "report": report.to_dict(rows),
    }
    print(
        f"{rows} rows, {manifest.tokens} tokens, {manifest.supervised_tokens} supervised; the draft vocabulary of "
        f"{params.draft_vocab_size} covers {vocab_map.coverage:.2%} of them",
        flush=True,
    )
    return StageResult(data, {"prepared": str(context.output_dir)})
