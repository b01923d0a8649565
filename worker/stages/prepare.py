"""prepare: conversations -> token ids, loss mask, token counts and the draft vocabulary."""

from pathlib import Path

import torch

from eagle3_core.contract.params import PrepareParams
from eagle3_core.contract.prepared_files import PreparedManifest
from eagle3_core.contract.verifier_files import read_verifier_files, tokenizer_fingerprint
from eagle3_core.data.conversations import TokenRow, cut, read_conversations, tokenize
from eagle3_core.data.prepared import save_manifest, save_rows
from eagle3_core.errors import BadData
from eagle3_core.model.vocab_map import build_vocab_map, save_vocab_map
from eagle3_core.training.ttt import counted_rows
from worker.context import StageContext, StageResult
from worker.hugging_face import HuggingFaceTokenizer
from worker.progress import Progress
from worker.remote_code import report_code

LOW_COVERAGE = 0.8


def run(context: StageContext) -> StageResult:
    """Tokenise, mask, count, and write the three files of the prepared directory."""
    params = context.params
    assert isinstance(params, PrepareParams)
    verifier = read_verifier_files(Path(params.verifier))
    for code, message in verifier.warnings:
        context.warn(code, message)

    context.phase("tokenising")
    if params.allow_remote_code:
        report_code(context, Path(params.verifier))
    tokenizer = HuggingFaceTokenizer(Path(params.verifier), params.allow_remote_code)
    source = Path(params.conversations)
    total = sum(1 for _ in read_conversations(source))
    if not total:
        raise BadData(f"{source} holds no conversation")
    rows: list[TokenRow] = []
    lines: list[int] = []
    dropped = {"nothing_to_train": 0, "answer_cut_off": 0}
    progress = Progress(context, total, "conversations")
    for line, messages in read_conversations(source):
        context.check_stop()
        row = tokenize(tokenizer, messages, f"{source}, line {line}")
        kept = cut(row, params.max_seq_len)
        if counted_rows(kept.loss_mask_T, 1).any():
            rows.append(kept)
            lines.append(line)
        else:
            dropped["answer_cut_off" if counted_rows(row.loss_mask_T, 1).any() else "nothing_to_train"] += 1
        progress.step()
    _warn_of_talk_behind_stops(context, rows, lines, tokenizer.stop_ids | set(verifier.eos_token_ids))
    for reason, count in dropped.items():
        if count:
            context.warn(f"rows_dropped_{reason}", f"{count} of {total} conversations were left out: {reason}")
    if not rows:
        raise BadData(f"{source}: none of {total} conversations has an answer to train on within max_seq_len")

    context.phase("writing")
    kept_ids = tokenizer.kept_ids | set(verifier.eos_token_ids)
    return _write(context, params, verifier.vocab_size, kept_ids, rows, lines, dropped)


def _warn_of_talk_behind_stops(
    context: StageContext, rows: list[TokenRow], lines: list[int], stop_ids: frozenset[int]
) -> None:
    """An answer that goes on behind a token that ends it: the text of a control token inside a message."""
    stops = torch.tensor(sorted(stop_ids))
    found = [
        line
        for line, row in zip(lines, rows, strict=True)
        if (torch.isin(row.token_ids_T[:-1], stops) & row.loss_mask_T[:-1] & row.loss_mask_T[1:]).any()
    ]
    if found:
        context.warn(
            "answer_goes_on_behind_its_end",
            f"{len(found)} conversations hold the text of an end-of-turn token inside an answer, so that what stands "
            f"behind it would never be said: lines {', '.join(map(str, found[:5]))}",
        )


def _write(
    context: StageContext,
    params: PrepareParams,
    vocab_size: int,
    kept_ids: frozenset[int],
    rows: list[TokenRow],
    lines: list[int],
    dropped: dict[str, int],
) -> StageResult:
    supervised = torch.cat([row.token_ids_T[row.loss_mask_T] for row in rows])
    highest = int(max(row.token_ids_T.max() for row in rows))
    if highest >= vocab_size:
        raise BadData(f"the tokenizer gave token {highest}, the verifier's vocabulary ends at {vocab_size - 1}")
    counts = torch.bincount(supervised, minlength=vocab_size)
    vocab_map = build_vocab_map(counts, params.draft_vocab_size, kept_ids)
    if vocab_map.coverage < LOW_COVERAGE:
        context.warn(
            "low_coverage",
            f"the draft vocabulary of {params.draft_vocab_size} covers {vocab_map.coverage:.1%} of what is supervised: "
            "the drafter cannot propose the rest; raise draft_vocab_size",
        )
    manifest = PreparedManifest(
        verifier=params.verifier,
        tokenizer_fingerprint=tokenizer_fingerprint(Path(params.verifier)),
        conversations=params.conversations,
        max_seq_len=params.max_seq_len,
        draft_vocab_size=params.draft_vocab_size,
        tokens=sum(len(row.token_ids_T) for row in rows),
        supervised_tokens=len(supervised),
        vocab_coverage=round(vocab_map.coverage, 6),
        dropped=dropped,
        lines=lines,
        prompts=[row.prompt for row in rows],
    )
    save_rows(context.output_dir, rows)
    save_vocab_map(context.output_dir, vocab_map)
    save_manifest(context.output_dir, manifest)
    data = {
        "rows": len(rows),
        "tokens": manifest.tokens,
        "supervised_tokens": manifest.supervised_tokens,
        "draft_vocab_size": params.draft_vocab_size,
        "vocab_coverage": manifest.vocab_coverage,
        "dropped": dropped,
    }
    print(
        f"{len(rows)} rows, {manifest.tokens} tokens, {len(supervised)} supervised; the draft vocabulary of "
        f"{params.draft_vocab_size} covers {vocab_map.coverage:.2%} of them",
        flush=True,
    )
    return StageResult(data, {"prepared": str(context.output_dir)})
