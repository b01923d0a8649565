"""What rows look like, and what of each is trained on: for `eyas data preview`, and for dry runs of prepare.

`python -P -m worker.preview VERIFIER CONVERSATIONS MAX_SEQ_LEN` prints the first rows as JSON, each text cut short; the
daemon asks it, which loads no tokenizer itself.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

from eagle3_core.contract.prepared_files import MANIFEST, load_manifest
from eagle3_core.contract.store_files import INDEX
from eagle3_core.contract.verifier_files import read_verifier_files, tokenizer_fingerprint
from eagle3_core.data.prepared import load_prepared
from eagle3_core.data.spans import SpanFinder
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.data.tokens import runs
from eagle3_core.errors import BadData, BadInput, BadRow, Eagle3Error
from worker.conversation_files import ConversationFile
from worker.hugging_face import HuggingFaceTokenizer
from worker.stages.prepare import masked_batches, within_vocabulary

DRY_ROWS = 3
DRY_CHARACTERS = 2_000
"""Of each row's text, in a dry run."""

MOST_TOKENS = 1 << 31
"""No vocabulary has more; tokenizers count in 32 bits."""


@dataclass(frozen=True)
class PreviewRow:
    """A row: its number, its text in parts that are trained on or not, or why it is left out."""

    row: int
    tokens: int = 0
    supervised: int = 0
    parts: list[tuple[str, bool]] = field(default_factory=list)
    left_out: str | None = None


def preview(
    path: Path,
    verifier: Path | None,
    first: int | None,
    count: int,
    max_seq_len: int | None = None,
    allow_remote_code: bool = False,
) -> Iterator[PreviewRow]:
    """Rows of a file of conversations, a prepared directory or a hidden-state store.

    Args:
        path: any of the three.
        verifier: whose tokenizer is used; default: the one the directory was made with. A file needs it.
        first: line of a file, from 1; row of the prepared data, from 0; default: the first.
        count: how many rows.
        max_seq_len: tokens that rows of a file are cut to.
        allow_remote_code: run the tokenizer's own Python.

    Raises:
        BadInput: path is none of the three, or the tokenizer is not the one it was made with.
        BadData: path is damaged, or has no such row.
    """
    if (path / MANIFEST).exists():
        manifest = load_manifest(path)
        made_with, fingerprint, rows = manifest.verifier, manifest.tokenizer_fingerprint, _prepared_rows
    elif (path / INDEX).exists():
        meta = HiddenStateStore(path).meta
        made_with, fingerprint, rows = meta.verifier, meta.tokenizer_fingerprint, _stored_rows
    elif path.is_dir():
        raise BadInput(f"{path} holds neither {MANIFEST} nor {INDEX}: it is no finished output of prepare or extract")
    elif not path.exists():
        raise BadInput(f"{path} is missing")
    elif verifier is None:
        raise BadInput(f"{path} is a file of conversations: --verifier says whose chat template renders them")
    else:
        yield from preview_conversations(path, verifier, first or 1, count, max_seq_len, allow_remote_code)
        return
    tokenizer = _tokenizer_of(path, verifier or Path(made_with), fingerprint, allow_remote_code)
    for number, ids, mask in rows(path, first or 0, count):
        yield _shown(number, ids, mask, tokenizer)


def preview_conversations(
    path: Path,
    verifier: Path,
    first: int,
    count: int,
    max_seq_len: int | None = None,
    allow_remote_code: bool = False,
) -> Iterator[PreviewRow]:
    """Rows of a file as prepare would make them, from line `first` on.

    Raises:
        BadInput: file or tokenizer cannot be used.
        BadData: the file is damaged, or ends before that line.
    """
    files = read_verifier_files(verifier)
    tokenizer = HuggingFaceTokenizer(verifier, allow_remote_code, files.eos_token_ids)
    wanted = islice((row for row in ConversationFile(path).rows() if row[0] >= first), count)
    found = False
    for batch in masked_batches(wanted, SpanFinder(tokenizer), tokenizer):
        for line, masked in batch:
            found = True
            row = masked if isinstance(masked, BadRow) else within_vocabulary(masked, files.vocab_size)
            if isinstance(row, BadRow):
                yield PreviewRow(line, left_out=f"{row.reason}: {row}")
                continue
            kept = row.cut(max_seq_len or len(row.token_ids))
            reason = "answer_cut_off" if row.is_trainable else "nothing_to_train"
            shown = _shown(line, kept.token_ids, kept.loss_mask, tokenizer)
            yield shown if kept.is_trainable else replace(shown, left_out=reason)
    if not found:
        raise BadData(f"{path} holds no line {first}")


def _tokenizer_of(path: Path, verifier: Path, fingerprint: str, allow_remote_code: bool) -> HuggingFaceTokenizer:
    if not verifier.is_dir():
        raise BadInput(f"{path} was made with the tokenizer of {verifier}, which is not there; give --verifier")
    if tokenizer_fingerprint(verifier) != fingerprint:
        raise BadInput(f"{path} was made with another tokenizer than that of {verifier}; give --verifier")
    return HuggingFaceTokenizer(verifier, allow_remote_code)


def _prepared_rows(path: Path, first: int, count: int) -> Iterator[tuple[int, list[int], list[bool]]]:
    _, rows = load_prepared(path)
    _need_rows(path, first, len(rows) - first)
    for number, row in enumerate(rows[first : first + count], first):
        yield number, row.token_ids_T.tolist(), row.loss_mask_T.tolist()


def _stored_rows(path: Path, first: int, count: int) -> Iterator[tuple[int, list[int], list[bool]]]:
    """By their numbers in the prepared data, which findings name too; a store holds the longest first."""
    store = HiddenStateStore(path)
    places = sorted((entry.row, place) for place, entry in enumerate(store.entries) if entry.row >= first)
    _need_rows(path, first, len(places))
    for number, place in places[:count]:
        ids, mask = store.tokens(place)
        yield number, ids.tolist(), mask.tolist()


def _need_rows(path: Path, first: int, found: int) -> None:
    if found < 1:
        raise BadData(f"{path} has no row {first}; rows are numbered from 0")


def _shown(number: int, ids: list[int], mask: list[bool] | bytes, tokenizer: HuggingFaceTokenizer) -> PreviewRow:
    if strange := [token for token in ids if not 0 <= token < MOST_TOKENS]:
        return PreviewRow(number, len(ids), sum(mask), left_out=f"damaged: {strange[0]} is no token id")
    found = runs(ids, mask)
    texts = tokenizer.decode_batch([tokens for tokens, _ in found])
    parts = [(text, trained) for text, (_, trained) in zip(texts, found, strict=True)]
    return PreviewRow(number, len(ids), sum(mask), parts)


def shortened(row: PreviewRow, characters: int) -> PreviewRow:
    """The row with about so much of its text at most, the beginning of each part."""
    limit = max(characters // max(len(row.parts), 1), 20)
    parts = [(text if len(text) <= limit else text[:limit] + " ...", trained) for text, trained in row.parts]
    return replace(row, parts=parts)


def main(arguments: list[str]) -> int:
    """Print the first rows for the daemon; a fault is one line on stderr."""
    verifier, conversations, max_seq_len = arguments
    try:
        rows = [
            asdict(shortened(row, DRY_CHARACTERS))
            for row in preview_conversations(Path(conversations), Path(verifier), 1, DRY_ROWS, int(max_seq_len))
        ]
    except Eagle3Error as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return int(error.exit_code)
    json.dump(rows, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
