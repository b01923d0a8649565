"""Conversions of inputs that broke other tools, of files of every kind, onto disks of every kind."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_core.checkpoint import convert as module
from eagle3_core.checkpoint.convert import convert
from eagle3_core.checkpoint.format import read_drafter_config
from eagle3_core.checkpoint.stream import PIECE_BYTES
from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.errors import BadInput, CheckpointError
from tests.cases import make_case
from tests.converting import drafter, same, weights
from tests.judging import WEIGHTS
from tests.makers import DRAFTER, H, drafter_tensors, random, write_drafter

# ---------------------------------------------------------------- inputs that broke other tools


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_published_rope_scaling_survives(tmp_path: Path, kind: str) -> None:
    source = make_case("H01", tmp_path) / kind
    rope = read_drafter_config(source).config.rope
    for to in ("vllm", "both"):
        out = convert(source, tmp_path / to, to).path
        same(source, out)
        config = json.loads((out / "config.json").read_text())
        assert {**config["rope_parameters"], **config["rope_scaling"]} == rope
        assert config["rope_theta"] == rope["rope_theta"]


def test_published_norm_switches_and_names(tmp_path: Path) -> None:
    cases = make_case("H02", tmp_path), make_case("H04", tmp_path)
    for number, source in enumerate([cases[0] / "fc", cases[1] / "midlayer", cases[1] / "model_prefix"]):
        same(source, convert(source, tmp_path / f"{number}", "vllm").path)
    with pytest.raises(CheckpointError, match="two names for one tensor"):
        convert(cases[1] / "both", tmp_path / "out", "vllm")


def test_a_published_position_limit_is_warned_about(tmp_path: Path) -> None:
    case = make_case("H05", tmp_path)
    done = convert(case / "draft", tmp_path / "out", "vllm", verifier=case / "verifier")
    assert "positions_short" in {finding.code for finding in done.verdict.findings}


@pytest.mark.parametrize(
    ("case", "folder", "reason"),
    [
        ("B01", ".", "d2t_absolute"),
        ("B02", ".", "identity_slice"),
        ("B05", ".", "missing_tensor"),
        ("E02", ".", "tie_word_embeddings"),
        ("G06", "cut", "missing_tensor"),
        ("H06", "wrong", "aux_id_count"),
        ("H07", "extra", "fc_bias"),
        ("H08", "four", "aux_id_count"),
    ],
)
def test_published_faults_are_not_converted(tmp_path: Path, case: str, folder: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        convert(make_case(case, tmp_path) / folder, tmp_path / "out", "vllm")


# ---------------------------------------------------------------- the directory


def test_files_of_torch_save_and_shards_are_read(tmp_path: Path) -> None:
    source = drafter(tmp_path)
    tensors = weights(source)
    pickled, sharded = tmp_path / "pickled", tmp_path / "sharded"
    for directory in (pickled, sharded):
        directory.mkdir()
        (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    # A transposed tensor lies in the file in another order than its elements.
    across = tensors["fc.weight"].t().contiguous().t()
    torch.save(tensors | {"fc.weight": across}, pickled / "pytorch_model.bin")
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    for number, half in enumerate(halves, 1):
        save_file(half, sharded / f"model-{number:05}-of-00002.safetensors")
    for directory in (pickled, sharded):
        same(source, convert(directory, tmp_path / f"from-{directory.name}", "vllm").path)


def test_a_weight_file_alone_is_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"give the directory that holds it and config\.json"):
        convert(drafter(tmp_path) / WEIGHTS, tmp_path / "out", "vllm")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    source = drafter(tmp_path)
    for name in ("full", "file"):
        (tmp_path / "full").mkdir(exist_ok=True)
        (tmp_path / "full" / "kept.txt").write_text("mine")
        (tmp_path / "file").write_text("mine")
        with pytest.raises(BadInput, match=r"is not empty|is no directory"):
            convert(source, tmp_path / name, "vllm")
    (tmp_path / "empty").mkdir()
    assert convert(source, tmp_path / "empty", "vllm").path == tmp_path / "empty"
    with pytest.raises(BadInput, match="no such directory"):
        convert(source, tmp_path / "nowhere" / "out", "vllm")
    with pytest.raises(BadInput, match="lies inside the checkpoint that is read"):
        convert(source, source / "out", "vllm")
    with pytest.raises(BadInput, match="is not empty"):
        convert(source, source, "vllm")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = drafter(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left") as caught:
        convert(source, tmp_path / "out", "vllm")
    assert caught.value.filename
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_stop_leaves_nothing_behind(tmp_path: Path) -> None:
    def stop() -> None:
        raise RuntimeError("not wanted any more")

    source = drafter(tmp_path)
    with pytest.raises(RuntimeError, match="not wanted"):
        convert(source, tmp_path / "out", "vllm", check_stop=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_a_killed_conversion_left_is_cleared(tmp_path: Path) -> None:
    source = drafter(tmp_path)
    stale, busy = tmp_path / ".convert-out-4194304.tmp", tmp_path / f".convert-out-{os.getppid()}.tmp"
    stale.mkdir()
    busy.mkdir()
    convert(source, tmp_path / "out", "vllm")
    assert (stale.exists(), busy.exists()) == (False, True)


def test_memory_does_not_grow_with_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece that is copied is small, whatever the tensor; the file is as large as it must be."""
    big = DRAFTER.model_copy(update={"vocab_size": 1 << 20, "draft_vocab_size": 1 << 19})
    largest = 0
    real = module.fill

    def watched(path: Path, planned: Any, starts: Any, stream: Any, check_stop: Any) -> None:
        nonlocal largest
        for tensor in planned.values():
            largest = max(largest, *(len(piece) for piece in tensor.pieces(stream)))
        real(path, planned, starts, stream, check_stop)

    monkeypatch.setattr(module, "fill", watched)
    source = write_big(tmp_path / "source", big)
    out = convert(source, tmp_path / "out", "vllm").path
    assert (out / WEIGHTS).stat().st_size > 3 * PIECE_BYTES
    assert largest <= PIECE_BYTES


def write_big(directory: Path, config: DrafterConfig) -> Path:
    """A drafter with a large vocabulary, whose map takes every second token, backwards."""
    small = drafter_tensors(DRAFTER)
    tokens = torch.arange(1, config.vocab_size, 2).flip(0)
    kept = torch.zeros(config.vocab_size, dtype=torch.bool)
    kept[tokens] = True
    tensors = small | {
        "embed_tokens.weight": random(config.vocab_size, H),
        "lm_head.weight": random(config.draft_vocab_size, H, seed=1),
        "d2t": tokens - torch.arange(len(tokens)),
        "t2d": kept,
    }
    made = write_drafter(directory)
    settings = json.loads((made / "config.json").read_text())
    settings["draft_vocab_size"] = config.draft_vocab_size
    settings["transformer_layer_config"]["vocab_size"] = config.vocab_size
    (made / "config.json").write_text(json.dumps(settings))
    save_file(tensors, made / WEIGHTS)
    (made / "manifest.json").unlink()
    (made / "optimizer_state_dict.pt").unlink()
    return made
