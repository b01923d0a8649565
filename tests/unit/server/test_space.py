"""How many bytes a job will write, against what is really written; and who has to wait."""

import struct
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eagle3_core.checkpoint.convert import convert
from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.params import ConvertParams, ExternalParams, ExtractParams, PrepareParams, TrainParams
from server.domain import space as sizes
from server.domain.job import Job
from server.domain.states import JobState
from server.errors import InsufficientStorage
from server.services.sizes import need_of
from server.services.space import Planned, Space
from server.settings import Settings
from server.system.disk import Reserve, free_bytes
from tests import makers, tiny

GB = 10**9


def write_rows(directory: Path, rows: int, tokens: int) -> Path:
    """A prepared directory of any size: a true header, and a file that is one hole."""
    directory.mkdir()
    header, at = [], 0
    for name, dtype, count, width in (("input_ids", "I32", tokens, 4), ("loss_mask", "BOOL", tokens, 1)):
        header.append(f'"{name}":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[{at},{at + count * width}]}}')
        at += count * width
    end = at + 8 * (rows + 1)
    header.append(f'"offsets":{{"dtype":"I64","shape":[{rows + 1}],"data_offsets":[{at},{end}]}}')
    text = "{" + ",".join(header) + "}"
    with (directory / "rows.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text.encode())
        file.truncate(8 + len(text) + end)
    return directory


def taken(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def test_ten_thousand_samples_of_kimi_k2_5_are_828_gb_of_hidden_states(tmp_path):
    """Four states of 7168 bfloat16 numbers are 57,344 bytes a token; 828 GB are 1,444 tokens a sample."""
    rows, tokens = 10_000, 14_439_000
    params = ExtractParams(verifier="/v", prepared_dir="/p")
    need = sizes.extract_need(params, tokens, rows, aux_states=3, hidden_size=7168)
    assert need.bytes == pytest.approx(828 * GB, rel=0.001)
    assert need.basis == "14,439,000 tokens x 4 states x 7168 x 2 bytes (bfloat16)"
    assert sizes.shown(need.bytes) == "828.1 GB"
    # The same through the headers of a directory of that size, with a verifier of 16 numbers a state.
    verifier = makers.write_verifier(tmp_path / "verifier")
    prepared = write_rows(tmp_path / "prepared", rows, tokens)
    seen = need_of(ExtractParams(verifier=str(verifier), prepared_dir=str(prepared)))
    assert seen == sizes.extract_need(params, tokens, rows, aux_states=3, hidden_size=makers.H)


def test_a_checkpoint_of_a_kimi_k2_5_drafter_is_14_gb():
    config = DrafterConfig(
        hidden_size=7168,
        intermediate_size=18_432,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
        vocab_size=163_840,
        draft_vocab_size=32_000,
        aux_layer_ids=(2, 30, 58),
        rope={},
    )
    size = sizes.size_of(config)
    params = TrainParams(verifier="/v", data_dir="/d", vocab_map_dir="/m")
    usual, frozen, embedding = (
        sizes.checkpoint_bytes(size, params.model_copy(update=asked))
        for asked in ({}, {"train_head": False}, {"train_embedding": True})
    )
    assert sizes.shown(usual) == "14.3 GB"
    assert usual - frozen == 32_000 * 7168 * 8
    assert embedding - usual == 163_840 * 7168 * 8


def test_the_size_of_a_store_is_told_beforehand(tmp_path):
    verifier = tiny.make_verifier(tmp_path / "verifier", hidden_size=32)
    store = tiny.make_store(tmp_path / "store", verifier, rows=200, length=60, shard_bytes=1_000_000)
    params = ExtractParams(verifier=str(verifier), prepared_dir="/p", shard_mb=1)
    told = sizes.extract_need(params, 200 * 60, 200, 3, 32).bytes
    assert taken(store) <= told <= 1.1 * taken(store)


@pytest.mark.parametrize("asked", [{}, {"train_head": False}, {"train_embedding": True}])
def test_the_size_of_a_checkpoint_is_told_beforehand(tmp_path, asked):
    params = TrainParams(**tiny.make_training_inputs(tmp_path), **asked)
    need = need_of(params)
    checkpoint = trained_once(tmp_path, params)
    one = need.bytes / sizes.checkpoints_at_once(params)
    assert taken(checkpoint) <= one <= taken(checkpoint) + 120_000
    from_it = need_of(params.model_copy(update={"finetune_from": str(checkpoint)}))
    assert from_it.bytes == pytest.approx(need.bytes, rel=0.01)


def trained_once(tmp_path: Path, params: TrainParams) -> Path:
    from eagle3_core.contract.events import EventWriter  # noqa: PLC0415 - torch comes with what follows
    from worker.context import StageContext  # noqa: PLC0415
    from worker.stages import train  # noqa: PLC0415

    out = tmp_path / "out"
    out.mkdir()
    events = EventWriter(tmp_path / "events.jsonl")
    train.run(StageContext("job", params.model_copy(update={"epochs": 1}), out, events, tmp_path))
    events.close()
    return out / "0"


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({"epochs": 5}, 6),
        ({"epochs": 5, "keep_last": 1}, 4),  # that one, the best, the one being written, one within the epoch
        ({"epochs": 5, "keep_last": 1, "val_ratio": 0.0}, 3),
        ({"epochs": 100, "keep_last": 2, "keep_every": 25}, 9),
        ({"epochs": 2, "keep_last": 50}, 3),
    ],
)
def test_how_many_checkpoints_lie_there_at_once(fields, number):
    params = TrainParams(verifier="/v", data_dir="/d", vocab_map_dir="/m", **fields)
    assert sizes.checkpoints_at_once(params) == number


def test_a_conversion_writes_the_weights_once_more(tmp_path):
    checkpoint = makers.write_drafter(tmp_path / "ours")
    done = convert(checkpoint, tmp_path / "both", "both")
    need = need_of(ConvertParams(checkpoint=str(checkpoint), to="both"))
    weights = (done.path / "model.safetensors").stat().st_size
    assert 0.8 * weights < need.bytes <= weights
    verifier = makers.write_verifier(tmp_path / "verifier")
    beside = need_of(ConvertParams(checkpoint=str(checkpoint), to="both", verifier=str(verifier)))
    assert beside == need, "it lends nothing to a checkpoint that has all"


def test_what_cannot_be_known_is_said(tmp_path):
    verifier = makers.write_verifier(tmp_path / "verifier")
    absent = need_of(ExtractParams(verifier=str(verifier), prepared_dir=str(tmp_path / "coming")))
    assert absent.bytes is None
    assert "rows.safetensors" in absent.basis
    assert need_of(ExternalParams(argv=("/bin/true",))).bytes is None
    conversations = tiny.make_conversations(tmp_path / "c.jsonl", count=1000)
    rough = need_of(PrepareParams(verifier=str(verifier), conversations=str(conversations)))
    assert rough.bytes > conversations.stat().st_size


# ---------------------------------------------------------------- room


@pytest.fixture
def extraction(tmp_path):
    """Parameters of an extraction that writes about 1.9 MB."""
    verifier = makers.write_verifier(tmp_path / "verifier")
    prepared = write_rows(tmp_path / "prepared", 10, 14_000)
    return ExtractParams(verifier=str(verifier), prepared_dir=str(prepared))


def job(params: ExtractParams, output: Path, number: int = 1, state: JobState = JobState.QUEUED) -> Job:
    now = datetime.now(UTC)
    return Job(number, f"job{number}", "one", params.stage, params.model_dump(mode="json"), str(output), now, state)


def room(tmp_path: Path, low_gb: float = 0.0) -> Space:
    return Space(Settings(state=tmp_path, disk_low_gb=low_gb))


def test_what_cannot_fit_is_refused_with_directory_and_bytes(tmp_path, small_disk, extraction):
    disk = small_disk(4 << 20)
    one = Planned("/jobs/0", "extract", extraction, disk.path / "states")
    space = room(tmp_path)
    space.refuse_what_cannot_fit([one], [])
    with pytest.raises(InsufficientStorage, match=r"extract needs 1\.9 MB in .*/states \(14,000 tokens x 4") as caught:
        space.refuse_what_cannot_fit([one, one, one], [])
    assert f"{sizes.shown(disk.free)} are free" in caught.value.detail
    assert caught.value.errors[0].pointer == "/jobs/0/params"
    running = job(extraction, disk.path / "running", state=JobState.RUNNING)
    space.refuse_what_cannot_fit([one], [running])
    with pytest.raises(InsufficientStorage, match=r"3\.8 MB of them for running jobs"):
        space.refuse_what_cannot_fit([one], [running, replace(running, id="job2")])
    with pytest.raises(InsufficientStorage, match=r"3\.0 MB stay free \(EYAS_DISK_LOW_GB\)"):
        room(tmp_path, 0.003).refuse_what_cannot_fit([one], [])


def test_a_job_waits_for_room_and_what_it_has_written_is_taken_off(tmp_path, small_disk, extraction):
    disk, space = small_disk(4 << 20), room(tmp_path)
    waiting = job(extraction, disk.path / "states")
    assert space.short(waiting, [waiting]) is None
    disk.fill(leave=1 << 20)
    text = space.short(waiting, [waiting])
    assert text == f"needs 1.9 MB in {disk.path / 'states'}, 1.0 MB are free"
    disk.fill(leave=1 << 19)
    assert space.waiting([waiting], [waiting])[waiting.id] == text, "the words do not change with every look"
    disk.empty()
    (disk.path / "states").mkdir()
    (disk.path / "states" / "shard_00000.safetensors").write_bytes(bytes(1 << 20))
    disk.fill(leave=1 << 20)
    assert room(tmp_path).short(waiting, [waiting]) is None


def test_below_the_low_water_mark_nothing_starts(tmp_path, small_disk):
    disk = small_disk(4 << 20)
    space = Space(Settings(state=disk.path, disk_low_gb=0.002))
    waiting = replace(job_of_a_program(tmp_path), output_dir=str(tmp_path))
    assert space.waiting([waiting], []) == {}
    disk.fill(leave=1 << 20)
    text = space.waiting([waiting], [])[waiting.id]
    assert text == f"waits for 2.0 MB of free disk in {disk.path}, 1.0 MB are free (EYAS_DISK_LOW_GB)"


def job_of_a_program(tmp_path: Path) -> Job:
    params = ExternalParams(argv=("/bin/true",)).model_dump(mode="json")
    return Job(1, "job1", "one", "external", params, str(tmp_path), datetime.now(UTC))


def test_the_reserve_is_given_up_bit_by_bit_and_taken_back(small_disk, monkeypatch):
    disk = small_disk(4 << 20)
    file = disk.path / "reserve"
    reserve = Reserve(file, 1 << 20)
    reserve.make_room()
    assert file.stat().st_blocks * 512 == 1 << 20
    disk.fill()
    assert disk.free == 0
    sizes_seen = []
    for _ in range(5):
        reserve.make_room()
        sizes_seen.append(file.stat().st_size)
        disk.fill()
    assert sizes_seen == [768 << 10, 512 << 10, 256 << 10, 0, 0]
    disk.empty()
    reserve.make_room()
    assert file.stat().st_size == 0, "not at once: whoever filled the disk may be at it still"
    now = reserve._refill_at + 1
    monkeypatch.setattr("server.system.disk.clock.boottime", lambda: now)
    reserve.make_room()
    assert file.stat().st_size == 1 << 20
    reserve.make_room(failed=True)
    assert file.stat().st_size == 768 << 10


def test_free_bytes_of_what_is_not_there_are_those_above_it(small_disk, tmp_path):
    disk = small_disk(1 << 20)
    assert free_bytes(disk.path / "a" / "b") == (disk.path.stat().st_dev, disk.free)
    assert free_bytes(tmp_path)[0] != disk.path.stat().st_dev
