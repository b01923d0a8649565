"""`make bench-prepare`: the prepare stage beside the tokenizer's own `encode_batch` over the same rendered texts.

Ours reads the file, renders each conversation twice, tokenises with offsets, masks, decodes what is masked, and writes;
the tokenizer alone is given the texts in memory, in batches of the same size. Both in turn, medians, the CPU seconds of
the whole process beside the wall clock, which other work on the machine disturbs. Without --verifier a byte-level BPE
tokenizer is trained on the repository's own documents. The last line is one JSON object.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.params import PrepareParams
from eagle3_core.data.conversations import Conversation
from tests import tiny
from worker.context import StageContext
from worker.conversation_files import ConversationFile
from worker.hugging_face import HuggingFaceTokenizer
from worker.stages import prepare

ROOT = Path(__file__).resolve().parents[1]


def make_verifier(place: Path) -> Path:
    """A verifier whose tokenizer was trained on the documents of the repository, split as GPT-2's is."""
    verifier = tiny.make_verifier(place / "verifier")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=list(tiny.SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in documents()], trainer)
    tokenizer.save(str(verifier / "tokenizer.json"))
    config = tiny.verifier_config(vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=2)
    (verifier / "config.json").write_text(json.dumps(config))
    make_weights_fit(verifier, tokenizer.get_vocab_size())
    return verifier


def make_weights_fit(verifier: Path, vocab_size: int) -> None:
    tensors = tiny.verifier_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].new_zeros(vocab_size, tiny.HIDDEN)
    save_file(tensors, verifier / "model.safetensors", metadata={"format": "pt"})


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("eagle3_core/**/*.py")])


def make_conversations(path: Path, rows: int) -> None:
    """Chats of one to three turns in lines of the documents, answers of about 300 tokens."""
    chance = random.Random(0)
    lines = [line for file in documents() for line in file.read_text().splitlines() if line.strip()]

    def text(least: int, most: int) -> str:
        return "\n".join(chance.choice(lines) for _ in range(chance.randint(least, most)))

    with path.open("w") as file:
        for _ in range(rows):
            messages = []
            for _ in range(chance.choice((1, 1, 2, 3))):
                messages += [{"role": "user", "content": text(1, 5)}, {"role": "assistant", "content": text(3, 24)}]
            file.write(json.dumps({"messages": messages}) + "\n")


def timed(work: Callable[[], int]) -> tuple[float, float]:
    """Tokens per wall second and per CPU second."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def run_stage(place: Path, verifier: Path, source: Path, number: int) -> int:
    out = place / f"out-{number}"
    out.mkdir()
    events = EventWriter(out / "events.jsonl")
    params = PrepareParams(
        verifier=str(verifier), conversations=str(source), draft_vocab_size=4_000, max_seq_len=1 << 20
    )
    tokens = prepare.run(StageContext("bench", params, out, events, out)).data["tokens"]
    events.close()
    assert isinstance(tokens, int)
    return tokens


def measure(place: Path, verifier: Path | None, rows: int, rounds: int) -> dict[str, Any]:
    """Both rates of both, and their ratios."""
    verifier = verifier or make_verifier(place)
    source = place / "conversations.jsonl"
    make_conversations(source, rows)
    tokenizer = HuggingFaceTokenizer(verifier)
    texts = [tokenizer.render(row) for _, row in ConversationFile(source).rows() if isinstance(row, Conversation)]
    batches = [texts[at : at + prepare.BATCH_ROWS] for at in range(0, len(texts), prepare.BATCH_ROWS)]

    def encode() -> int:
        return sum(
            sum(len(one) for one in tokenizer.inner.backend_tokenizer.encode_batch(batch, add_special_tokens=False))
            for batch in batches
        )

    encode()  # fills the tokenizer's cache
    ours, theirs = [], []
    for number in range(rounds):
        theirs.append(timed(encode))
        ours.append(timed(partial(run_stage, place, verifier, source, number)))
    (our_wall, our_cpu), (their_wall, their_cpu) = (
        [statistics.median(column) for column in zip(*rates, strict=True)] for rates in (ours, theirs)
    )
    return {
        "rows": rows,
        "tokens": encode(),
        "tokens_per_s": round(our_wall),
        "encode_batch_tokens_per_s": round(their_wall),
        "ratio_to_encode_batch": round(our_wall / their_wall, 3),
        "cpu_ratio_to_encode_batch": round(our_cpu / their_cpu, 3),
        "versions": {
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "transformers": transformers.__version__,
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", type=Path, help="directory with another tokenizer and its chat template")
    parser.add_argument("--rows", type=int, default=16_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), options.verifier, options.rows, options.rounds)
    print(json.dumps(found))
