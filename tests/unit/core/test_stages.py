"""The stages themselves, in this process: what they refuse, what they warn of, and what they leave behind."""

import importlib
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.params import STAGES
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.errors import BadData, BadInput, CheckpointError, InvalidCheckpoint, UnreadableFile
from tests import makers, tiny
from tests.cases import make_case
from worker.context import StageContext, StageResult


class Bench:
    """Runs stages one after the other, each in a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs = 0
        self.place = root
        self.verifier = tiny.make_verifier(root / "verifier")
        self.conversations = tiny.make_conversations(root / "conversations.jsonl")

    def run(self, stage: str, output: Path | None = None, **params: Any) -> StageResult:
        self.jobs += 1
        self.place = self.root / f"{stage}-{self.jobs}"
        self.place.mkdir(parents=True)
        output = output or self.place / "out"
        output.mkdir(exist_ok=True)
        events = EventWriter(self.place / "events.jsonl")
        told = {name: str(value) if isinstance(value, Path) else value for name, value in params.items()}
        try:
            order = STAGES[stage](**told)
            result = importlib.import_module(f"worker.stages.{stage}").run(
                StageContext("job", order, output, events, output / "control")
            )
        finally:
            events.close()
        assert isinstance(result, StageResult)
        return result

    @property
    def out(self) -> Path:
        return self.place / "out"

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.place / "events.jsonl").read_bytes().splitlines()]
        return [line for line in lines if line["type"] == kind]

    def warned(self) -> list[str]:
        return [event["code"] for event in self.events("warning")]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def inputs(bench: Bench) -> dict[str, Any]:
    """Parameters of a training on random states."""
    store = tiny.make_store(bench.root / "store", bench.verifier)
    prepared = tiny.make_vocab_map(bench.root / "prepared", store)
    return {
        "verifier": bench.verifier,
        "data_dir": store,
        "vocab_map_dir": prepared,
        "epochs": 1,
        "lr": 1e-3,
        "max_seq_len": 64,
    }


def prepare(bench: Bench, **params: Any) -> Path:
    wanted = {"verifier": bench.verifier, "conversations": bench.conversations, "draft_vocab_size": 64}
    bench.run("prepare", **{**wanted, **params})
    return bench.out


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        ({"draft_vocab_size": 300}, BadInput, "300 is not between .* vocabulary of 259"),
        ({"max_seq_len": 8}, BadData, "none of 8 conversations has an answer to train on within max_seq_len"),
    ],
)
def test_prepare_refuses_and_writes_nothing(bench: Bench, params: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        prepare(bench, **params)
    assert not list(bench.out.iterdir())


def test_prepare_refuses_a_file_without_conversations(bench: Bench) -> None:
    bench.conversations.write_text("\n")
    with pytest.raises(BadData, match=r"conversations.jsonl holds no conversation"):
        prepare(bench)


def test_prepare_warns_of_a_vocabulary_too_small_and_of_talk_behind_an_end(bench: Bench) -> None:
    answer = {"role": "assistant", "content": "yes<|im_end|>and no"}
    line = json.dumps({"messages": [{"role": "user", "content": "hi"}, answer]})
    with bench.conversations.open("a") as file:
        file.write(line + "\n")
    prepare(bench, draft_vocab_size=1)
    assert bench.warned() == ["answer_goes_on_behind_its_end", "low_coverage"]
    assert "1 conversations" in bench.events("warning")[0]["message"]
    assert bench.events("warning")[0]["message"].endswith("lines 9")


def test_extract_refuses_what_another_tokenizer_prepared_and_rows_too_long(bench: Bench) -> None:
    prepared = prepare(bench)
    short = tiny.make_verifier(bench.root / "short", max_position_embeddings=40)
    with pytest.raises(BadInput, match=r"holds a row of .* tokens, the verifier .* is made for 40"):
        bench.run("extract", verifier=short, prepared_dir=prepared)
    (bench.verifier / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BadInput, match="was prepared with the tokenizer of"):
        bench.run("extract", verifier=bench.verifier, prepared_dir=prepared)
    assert not list(bench.out.iterdir())


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bfloat16"}, {"val_ratio": 0.0}, {"ttt_steps": 16}, {"train_head": False}, {"seed": -(1 << 63)}],
    ids=lambda changes: next(iter(changes)),
)
def test_train_at_the_edges(bench: Bench, inputs: dict[str, Any], changes: dict[str, Any]) -> None:
    result = bench.run("train", **{**inputs, **changes})
    assert [event["verdict"] for event in bench.events("verdict")] == ["valid"]
    [epoch] = result.data["epochs"]
    assert (epoch["val"] is None) == ("val_ratio" in changes)
    assert bench.warned() == (["ttt_steps_without_rows"] if "ttt_steps" in changes else [])
    assert (epoch["train"]["loss_per_step"][-1] is None) == ("ttt_steps" in changes)


def test_train_on_a_full_vocabulary_and_a_single_row(bench: Bench, inputs: dict[str, Any]) -> None:
    store = tiny.make_store(bench.root / "one", bench.verifier, rows=1)
    full = tiny.make_vocab_map(bench.root / "full", store, tiny.VOCAB)
    bench.run("train", **{**inputs, "data_dir": store, "vocab_map_dir": full})
    assert bench.warned() == ["no_validation"]
    assert "d2t" not in load_file(bench.out / "0" / "model.safetensors")
    assert (bench.out / "0" / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_train_on_states_of_eight_bits_comes_close_to_train_on_bfloat16(bench: Bench, inputs: dict[str, Any]) -> None:
    small = tiny.make_store(bench.root / "small", bench.verifier, dtype="float8_e4m3")
    losses = []
    for store in (inputs["data_dir"], small):
        [epoch] = bench.run("train", **{**inputs, "data_dir": store}).data["epochs"]
        losses.append(epoch["val"]["loss"])
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


def test_train_warns_of_a_map_made_with_another_tokenizer(bench: Bench, inputs: dict[str, Any]) -> None:
    other = tiny.make_verifier(bench.root / "other")
    (other / "special_tokens_map.json").write_text("{}")
    prepared = prepare(bench, verifier=other)
    bench.run("train", **{**inputs, "vocab_map_dir": prepared})
    assert bench.warned() == ["vocabulary_map_differs"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t["token_ids"][2].fill_(5000), r"row 4: token_ids from \d+ to 5000, the verifier has 259 tokens"),
        (lambda t: t["hidden_states"][3, 1, 5].fill_(float("nan")), r"^\S*shard_00001.safetensors, row 4: 1 NaN"),
    ],
)
def test_train_refuses_a_store_that_was_spoilt(bench: Bench, inputs: dict[str, Any], spoil: Any, said: str) -> None:
    tiny.spoil_shard(inputs["data_dir"], 1, spoil)
    with pytest.raises(BadData, match=said):
        bench.run("train", **inputs, num_workers=0)
    assert not list(bench.out.iterdir())


def test_a_reader_process_hands_over_what_is_wrong_in_its_own_words(bench: Bench, inputs: dict[str, Any]) -> None:
    tiny.spoil_shard(inputs["data_dir"], 1, lambda t: t["hidden_states"][3, 1, 5].fill_(float("nan")))
    with pytest.raises(
        BadData, match=r"^\S*shard_00001.safetensors, row 4: 1 NaN and 0 Inf among the states of layer 4"
    ):
        bench.run("train", **inputs, num_workers=1)


@pytest.mark.parametrize(
    ("case", "part", "said"),
    [
        ("B01", "", "model.safetensors: d2t looks absolute"),
        ("B02", "", "model.safetensors: d2t is all zero"),
        ("G04", "nan", "model.safetensors: norm.weight holds 1 NaN"),
        ("G04", "inf", "model.safetensors: fc.weight holds 0 NaN and 1 Inf"),
        ("G06", "cut", "model.safetensors: lm_head.weight is missing"),
    ],
)
def test_published_faults_of_a_source_are_refused(bench: Bench, case: str, part: str, said: str) -> None:
    source = make_case(case, bench.root) / part
    verifier = makers.write_verifier(bench.root / "small")
    (verifier / "tokenizer.json").write_text("{}")
    store = tiny.make_store(bench.root / "states", verifier)
    with pytest.raises(CheckpointError, match=f"finetune_from {source} is invalid: {said}"):
        bench.run("train", verifier=verifier, data_dir=store, finetune_from=source)
    with pytest.raises(InvalidCheckpoint, match=f"{source} is invalid: .*{said}"):
        bench.run("evaluate", verifier=bench.verifier, checkpoint=source, prompts=bench.conversations)


def test_what_is_suspect_in_a_source_or_not_stated_is_said(bench: Bench) -> None:
    source = make_case("G04", bench.root) / "zero"
    verifier = makers.write_verifier(bench.root / "small")
    (verifier / "tokenizer.json").write_text("{}")
    store = tiny.make_store(bench.root / "states", verifier)
    bench.run("train", verifier=verifier, data_dir=store, finetune_from=source, epochs=1, max_seq_len=64)
    assert bench.warned() == ["all_zero", "aux_ids_not_stated"]


def test_evaluate_refuses_a_drafter_of_another_size_and_a_prompt_too_long(bench: Bench) -> None:
    drafter = makers.write_drafter(bench.root / "drafter")
    wanted = {"verifier": bench.verifier, "checkpoint": drafter, "prompts": bench.conversations}
    with pytest.raises(InvalidCheckpoint, match="hidden_size is 16, the verifier's hidden_size is 32"):
        bench.run("evaluate", **wanted)
    with pytest.raises(BadInput, match=r"max_new_tokens 600 make 6.. tokens, the verifier is made for 512"):
        bench.run("evaluate", **wanted, max_new_tokens=600)
    bench.conversations.write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}))
    with pytest.raises(BadData, match="line 1: begins with an assistant message"):
        bench.run("evaluate", **wanted)


def test_evaluate_makes_up_a_t2d_that_servers_do_not_read(bench: Bench, inputs: dict[str, Any]) -> None:
    bench.run("train", **inputs)
    whole, bare = bench.out / "0", bench.root / "bare"
    shutil.copytree(whole, bare)
    (bare / "manifest.json").unlink()
    config = json.loads((bare / "config.json").read_text())
    layer = config.pop("transformer_layer_config")
    kept = {
        name: config[name] for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    }
    (bare / "config.json").write_text(json.dumps(layer | kept | {"architectures": ["LlamaForCausalLMEagle3"]}))
    tensors = load_file(bare / "model.safetensors")
    del tensors["t2d"]
    save_file(tensors, bare / "model.safetensors")
    wanted = {"verifier": bench.verifier, "prompts": bench.conversations, "max_prompts": 2, "max_new_tokens": 6}
    first, second = (bench.run("evaluate", checkpoint=path, **wanted).data for path in (whole, bare))
    assert first == second
    assert first["prompts_identical"] == first["prompts_decoded"] == 2


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: the nearest thing to a full disk that needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_is_named_by_file_and_leaves_nothing_half_written(
    bench: Bench, inputs: dict[str, Any]
) -> None:
    prepared = prepare(bench)
    with files_up_to(6_000), pytest.raises(OSError, match=r"too large: '\S*/out/shard_00000.safetensors'"):
        bench.run("extract", verifier=bench.verifier, prepared_dir=prepared, aux_layer_ids=(2, 4, 5))
    assert not list(bench.out.iterdir())
    with files_up_to(60_000), pytest.raises(OSError, match=r"too large.*optimizer_state_dict.pt"):
        bench.run("train", **inputs)
    assert not list(bench.out.iterdir())


def test_states_of_a_verifier_with_other_weights_are_told_and_a_copy_in_another_dtype_is_the_same(
    bench: Bench, inputs: dict[str, Any]
) -> None:
    """A fine-tuned verifier has the config of its base; targets come from embedding, head and final norm."""
    other = tiny.make_verifier(bench.root / "other", seed=5)
    bench.run("train", **{**inputs, "verifier": other})
    [told] = bench.events("warning")
    assert (told["code"], "targets would be another verifier's" in told["message"]) == ("verifier_differs", True)
    tensors = load_file(bench.verifier / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(rounded, other / "model.safetensors", metadata={"format": "pt"})
    bench.run("train", **{**inputs, "verifier": other})
    assert bench.warned() == []


def test_extraction_does_not_go_on_with_other_weights(bench: Bench) -> None:
    prepared = prepare(bench)
    bench.run("extract", verifier=bench.verifier, prepared_dir=prepared, verify_rows=0)
    meta = HiddenStateStore(bench.out).meta
    assert meta.output_fingerprint is not None
    assert meta.contradiction(meta.model_copy(update={"output_fingerprint": None})) is None, "as before it was noted"
    assert "output_fingerprint" in str(meta.contradiction(meta.model_copy(update={"output_fingerprint": "0"})))


@pytest.mark.parametrize(
    ("tensor", "value", "said"),
    [
        ("model.norm.weight", float("nan"), "model.norm.weight holds values not finite"),
        ("lm_head.weight", float("-inf"), "lm_head.weight holds values not finite"),
        ("lm_head.weight", 0.0, "lm_head.weight holds nothing but zeros"),
    ],
)
def test_a_verifier_that_would_spoil_every_loss_is_named_and_the_data_is_not(
    bench: Bench, inputs: dict[str, Any], tensor: str, value: float, said: str
) -> None:
    tensors = load_file(bench.verifier / "model.safetensors")
    tensors[tensor].fill_(value)
    save_file(tensors, bench.verifier / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnreadableFile, match=f"verifier/model.safetensors: {said}"):
        bench.run("train", **inputs)


def test_a_drafter_that_guessing_would_beat_is_told(bench: Bench, inputs: dict[str, Any]) -> None:
    bench.run("train", **{**inputs, "lr": 10.0, "warmup_ratio": 0.0})
    assert "worse_than_chance" in bench.warned()


def test_skipping_every_row_is_refused_before_hours_of_nothing(bench: Bench, inputs: dict[str, Any]) -> None:
    few = tiny.make_vocab_map(bench.root / "few", inputs["data_dir"], 2)
    bench.run("train", **{**inputs, "vocab_map_dir": few})
    with pytest.raises(
        BadData, match=r"for .* of .* rows looked at, and outside_vocab skip .*: nothing would be learned"
    ):
        bench.run("train", **{**inputs, "vocab_map_dir": few, "outside_vocab": "skip"})
