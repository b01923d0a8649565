"""The judge's levels and forms: quick without torch, bounded reading, the deep look, SARIF, the command's statuses."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from client.checkpoint import MISUSED, misuse, verify
from eagle3_core.checkpoint.archive import ArchiveTensor, read_archive, tensors_in
from eagle3_core.checkpoint.judge import judge
from eagle3_core.checkpoint.quick import judge_quick
from eagle3_core.checkpoint.stream import Stream
from eagle3_core.checkpoint.tensors import read_drafter_tensors
from eagle3_core.checkpoint.write import write_manifest
from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.params import TrainParams, ValidateParams
from eagle3_core.deep import judge_deep
from eagle3_core.errors import UnreadableFile
from tests import tiny
from tests.cases import make_case, peer_checkpoint
from tests.judging import OPTIMIZER, WEIGHTS, drop, foreign, found, loud
from tests.makers import D, H, drafter_tensors, write_drafter, write_verifier
from worker.context import StageContext
from worker.stages import train, validate

# ---------------------------------------------------------------- quick


def test_quick_needs_no_torch(tmp_path: Path) -> None:
    path = write_drafter(tmp_path)
    code = (
        "import sys; from pathlib import Path; from eagle3_core.checkpoint.quick import judge_quick; "
        f"verdict = judge_quick(Path({str(path)!r})); print(verdict.verdict, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["valid", "False"]


@pytest.mark.parametrize(
    ("change", "config", "code"),
    [
        (drop("fc.weight"), {}, "missing_tensor"),
        (lambda tensors: tensors.update(d2t=torch.arange(D)), {}, "d2t_t2d_differ"),
        (drop(), {"norm_before_fc": True}, "flag_without_tensor"),
        (drop(), {"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 5]}, "aux_id_count"),
    ],
)
def test_quick_tells_what_headers_map_and_config_tell(
    tmp_path: Path, change: Any, config: dict[str, Any], code: str
) -> None:
    path = foreign(tmp_path, change, **config)
    assert found(judge_quick(path), code) == found(judge(path), code)


def test_quick_knows_an_edited_config_and_a_foreign_optimizer_by_the_manifest(tmp_path: Path) -> None:
    path = write_drafter(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["transformer_layer_config"]["rms_norm_eps"] = 1e-3
    (path / "config.json").write_text(json.dumps(config))
    message = found(judge_quick(path), "config_edited").message
    assert message.startswith("transformer_layer_config.rms_norm_eps is 0.001, was 1e-05")
    torch.save({"state": {}, "param_groups": []}, path / OPTIMIZER)
    assert found(judge_quick(path), "size_differs").file == OPTIMIZER


# ---------------------------------------------------------------- formats


def test_shards_of_either_kind_are_one_drafter(tmp_path: Path) -> None:
    source = foreign(tmp_path)
    tensors = load_file(source / WEIGHTS)
    names = sorted(tensors)
    halves = [{name: tensors[name] for name in names[::2]}, {name: tensors[name] for name in names[1::2]}]
    for kind, save in (("safetensors", save_file), ("bin", lambda part, file: torch.save(part, file))):
        path = tmp_path / kind
        path.mkdir()
        shutil.copy(source / "config.json", path)
        stem = "model" if kind == "safetensors" else "pytorch_model"
        for number, half in enumerate(halves, 1):
            save(half, path / f"{stem}-{number:05}-of-00002.{kind}")
        assert judge(path).verdict == "valid"
        assert read_drafter_tensors(path).keys() == tensors.keys()
        (path / f"{stem}-00002-of-00002.{kind}").unlink()
        assert judge(path).verdict == "unreadable"


def test_a_flipped_byte_in_a_torch_save_file_is_told_by_its_own_checksum(tmp_path: Path) -> None:
    source = foreign(tmp_path)
    path = tmp_path / "bin"
    path.mkdir()
    shutil.copy(source / "config.json", path)
    file = path / "pytorch_model.bin"
    torch.save(load_file(source / WEIGHTS), file)
    assert judge(path).verdict == "valid"
    content = read_archive(file).content
    assert isinstance(content, dict)
    info = content["fc.weight"].info
    raw = bytearray(file.read_bytes())
    raw[info.start + 11] ^= 1
    file.write_bytes(raw)
    finding = found(judge(path), "checksum_differs")
    assert (finding.severity, finding.file, finding.tensor) == ("error", "pytorch_model.bin", "fc.weight")


def test_archives_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    saved = {
        "whole": base,
        "view": base[1:3],
        "turned": base.T,
        "parameter": torch.nn.Parameter(base.bfloat16()),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "small": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "nested": [{"deep": (torch.ones(2, dtype=torch.bool), "text", 1.5, None, True, 2**40)}],
    }
    torch.save(saved, tmp_path / "file.pt")
    archive = read_archive(tmp_path / "file.pt")
    assert isinstance(archive.content, dict)
    raw = (tmp_path / "file.pt").read_bytes()
    for name in ("whole", "view", "parameter", "scalar"):
        tensor, info = saved[name], archive.content[name].info
        assert isinstance(tensor, torch.Tensor)
        read = torch.frombuffer(bytearray(raw[info.start : info.end]), dtype=tensor.dtype).reshape(info.shape)
        assert torch.equal(read, tensor)
    assert archive.content["turned"] == ArchiveTensor("F32", (6, 4), None)
    assert [tensor.dtype for tensor in tensors_in(archive.content["nested"])] == ["BOOL"]
    assert archive.content["nested"][0]["deep"][1:] == ("text", 1.5, None, True, 2**40)


def test_no_damage_to_an_archive_is_anything_but_an_error_that_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}, file)
    whole = file.read_bytes()
    for place in range(0, len(whole), 3):
        for content in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :]):
            file.write_bytes(content)
            with contextlib.suppress(UnreadableFile):  # bytes that mean nothing may pass
                read_archive(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02r\xff\xff\xff\x7f.")  # asks for memory of 2 GB entries
    with pytest.raises(UnreadableFile, match="damaged"):
        read_archive(file)


def test_the_format_of_torch_before_1_6_is_named(tmp_path: Path) -> None:
    source = foreign(tmp_path)
    (source / WEIGHTS).unlink()
    torch.save(drafter_tensors(), source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    verdict = judge(source)
    assert (verdict.verdict, found(verdict, "legacy_pickle").file) == ("unreadable", "pytorch_model.bin")


# ---------------------------------------------------------------- reading


def test_pieces_are_paced_and_come_in_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(40_000_000)
    (tmp_path / "file").write_bytes(content)
    slept: list[float] = []
    monkeypatch.setattr("eagle3_core.checkpoint.stream.time.sleep", slept.append)
    with Stream(10e6).opened(tmp_path / "file") as file:
        pieces = [bytes(piece) for piece in file.pieces(5, 40_000_000, row_bytes=999)]
    assert b"".join(pieces) == content[5:]
    assert all(len(piece) % 999 == 0 for piece in pieces[:-1])
    assert slept[-1] > 3  # 40 MB at 10 MB/s, read at once
    with pytest.raises(UnreadableFile, match="ended at byte"), Stream().opened(tmp_path / "file") as file:
        list(file.pieces(0, 40_000_001))


def test_memory_does_not_grow_with_size(tmp_path: Path) -> None:
    path = foreign(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["transformer_layer_config"]["vocab_size"] = rows = 8_000_000
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / WEIGHTS)
    tensors["embed_tokens.weight"] = torch.randint(1, 30_000, (rows, H), dtype=torch.int16).view(torch.bfloat16)
    tensors["t2d"] = torch.cat((tensors["t2d"], torch.zeros(rows - len(tensors["t2d"]), dtype=torch.bool)))
    save_file(tensors, path / WEIGHTS)
    del tensors
    code = (
        "import re; from pathlib import Path; from eagle3_core.checkpoint.judge import judge\n"
        "def kb(key): return int(re.search(key + r':\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        f"Path('/proc/self/clear_refs').write_text('5'); before = kb('VmRSS'); judge(Path({str(path)!r}))\n"
        "print(kb('VmHWM') - before)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert (path / WEIGHTS).stat().st_size > 256e6
    assert int(run.stdout) * 1024 < 256e6


# ---------------------------------------------------------------- deep


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of a real training, and what it was trained with."""
    inputs = tiny.make_training_inputs(tmp_path / "inputs")
    out = Path(inputs["output_dir"])
    out.mkdir()
    events = EventWriter(tmp_path / "events.jsonl")
    params = TrainParams.model_validate({**inputs, "epochs": 3})
    train.run(StageContext("job", params, out, events, tmp_path / "control"))
    events.close()
    return out / "1", inputs


def deep(path: Path, inputs: dict[str, Any]) -> Any:
    return judge_deep(path, verifier=Path(inputs["verifier"]), store=Path(inputs["data_dir"]))


def resealed(path: Path, to: Path) -> Path:
    """A copy whose manifest vouches for what was changed."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").unlink()
    write_manifest(path, epoch=manifest["epoch"], step=manifest["step"], extra=manifest["extra"])
    return path


def test_deep_runs_the_drafter_and_resumes(trained: tuple[Path, dict[str, Any]]) -> None:
    path, inputs = trained
    verdict = deep(path, inputs)
    assert (verdict.verdict, verdict.level, loud(verdict)) == ("valid", "deep", [])
    told = [finding.message for finding in verdict.findings if finding.code == "measured"]
    assert told[0].startswith("loss ")
    assert "goes on from step" in told[1]
    latest = deep(path.parent, inputs)
    assert (latest.verdict, latest.level, loud(latest)) == ("valid", "deep", []), "an output directory: its latest"
    assert found(latest, "latest_judged")
    assert [finding.code for finding in latest.findings].count("measured") == 2


def test_deep_finds_what_reading_cannot(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, inputs = trained
    tensors = load_file(path / WEIGHTS)
    tensors["norm.weight"] = tensors["norm.weight"] * -3
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    verdict = deep(resealed(path, tmp_path), inputs)
    assert judge(path).verdict == "valid"
    assert (verdict.verdict, found(verdict, "training_disagrees").file) == ("invalid", "manifest.json")


def test_deep_finds_an_optimizer_that_cannot_be_resumed(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, inputs = trained
    state = torch.load(path / OPTIMIZER, weights_only=True)
    state["param_groups"].append({**state["param_groups"][0], "params": []})
    torch.save(state, path / OPTIMIZER)
    assert "fit this run" in found(deep(resealed(path, tmp_path), inputs), "resume_fails").message


def test_deep_refuses_a_store_of_other_layers_and_another_kind_of_drafter(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, inputs = trained
    store = tiny.make_store(tmp_path / "other", Path(inputs["verifier"]), layer_ids=(1, 2, 3))
    verdict = judge_deep(path, verifier=Path(inputs["verifier"]), store=store)
    assert "holds states [1, 2, 3]" in found(verdict, "store_unreadable").message
    assert (
        "is not a finished"
        in found(
            judge_deep(path, verifier=Path(inputs["verifier"]), store=tmp_path / "absent"), "store_unreadable"
        ).message
    )


def test_deep_does_not_run_what_is_invalid(trained: tuple[Path, dict[str, Any]]) -> None:
    path, inputs = trained
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1])
    assert (deep(path, inputs).verdict, deep(path, inputs).level) == ("unreadable", "full")


def test_the_stage_goes_as_deep_as_it_is_asked(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, inputs = trained
    asked = {"checkpoint": str(path), "verifier": inputs["verifier"]}
    for level, more in (("quick", {}), ("full", {}), ("deep", {"data_dir": inputs["data_dir"]})):
        out = tmp_path / level
        out.mkdir()
        events = EventWriter(out / "events.jsonl")
        params = ValidateParams.model_validate({**asked, **more, "level": level})
        result = validate.run(StageContext("job", params, out, events, out / "control"))
        events.close()
        verdict = json.loads((out / "verdict.json").read_text())
        assert (result.data["level"], verdict["level"]) == (level, level)
        assert result.data["servers"].keys() == {"speculators", "vllm-v1", "vllm-v2", "sglang"}
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0, "only the judging thread stepped back"


@pytest.mark.parametrize(
    "wrong",
    [{"level": "deep"}, {"data_dir": "d"}, {"level": "quick", "previous": "p"}, {"level": "quick", "max_mb_per_s": 1}],
)
def test_parameters_that_a_level_does_not_take_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"level|data_dir"):
        ValidateParams.model_validate({"checkpoint": "c", **wrong})


# ---------------------------------------------------------------- forms


def test_sarif(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = foreign(tmp_path, drop("fc.weight"))
    assert verify(path, "sarif") == 2
    log = json.loads(capsys.readouterr().out)
    [run] = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    [result] = [one for one in run["results"] if one["ruleId"] == "missing_tensor"]
    assert (log["version"], result["level"], rules[result["ruleIndex"]]) == ("2.1.0", "error", "missing_tensor")
    location = result["locations"][0]
    assert location["physicalLocation"]["artifactLocation"] == {"uri": WEIGHTS, "uriBaseId": "CHECKPOINT"}
    assert location["logicalLocations"][0]["name"] == "fc.weight"
    assert run["originalUriBaseIds"]["CHECKPOINT"]["uri"] == f"{path.as_uri()}/"
    assert {one["level"] for one in run["results"]} <= {"error", "warning", "note"}
    assert len(rules) == len(set(rules))


def test_the_command_tells_of_servers_and_of_options_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = foreign(tmp_path)
    assert verify(path, level="quick", servers=True) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "SGLang 0.5.23" in out
    assert "refuses" in out
    assert misuse("full", None, None, None, None) is None
    assert "needs --store and --verifier" in str(misuse("deep", None, None, None, None))
    assert MISUSED not in (0, 1, 2, 3)


# ---------------------------------------------------------------- inputs that broke other tools


def verdict_on(tmp_path: Path, case: str, folder: str, verifier: bool = False) -> Any:
    place = make_case(case, tmp_path)
    return judge(place / folder, verifier=place / "verifier" if verifier else None)


@pytest.mark.parametrize(
    ("case", "folder", "verifier", "word", "code", "words"),
    [
        ("E02", ".", False, "invalid", "tied_head", "draft_vocab_size 24"),
        ("F01", "ckpts", False, "unreadable", "truncated_file", "11,880 expected"),
        ("F06", "ckpts", False, "valid", "latest_judged", "10/, was judged; passed over: .11, 11.tmp"),
        ("H05", "draft", True, "suspect", "positions_short", "is 64, the verifier's is 512"),
        ("H06", "missing", True, "invalid", "aux_id_count", "target_hidden_size 32 would fit"),
        (
            "H06",
            "wrong",
            True,
            "invalid",
            "verifier_differs",
            "target_hidden_size is 24, the verifier's hidden_size is 32",
        ),
        ("H07", "absent", False, "invalid", "flag_without_tensor", "fc_bias"),
        ("H07", "attn", False, "invalid", "tensor_without_flag", "attention_bias"),
        ("H08", "neg", False, "invalid", "bad_config", "[-1, 2, 4]"),
        ("H08", "text", False, "invalid", "bad_config", "['2', '4', '5']"),
        ("H08", "none", False, "valid", "aux_ids_not_stated", "servers take"),
        ("B03", ".", False, "invalid", "t2d_count", "15 tokens, draft_vocab_size is 24"),
    ],
)
def test_further_published_faults(
    tmp_path: Path, case: str, folder: str, verifier: bool, word: str, code: str, words: str
) -> None:
    verdict = verdict_on(tmp_path, case, folder, verifier)
    assert verdict.verdict == word
    assert any(words in finding.message for finding in verdict.findings if finding.code == code), verdict.findings


@pytest.mark.parametrize(
    "folder", ["H01/linear", "H01/llama3", "H01/yarn", "H02/fc", "H04/midlayer", "H06/ok", "B04/start"]
)
def test_published_drafters_that_are_sound(tmp_path: Path, folder: str) -> None:
    case, part = folder.split("/")
    place = make_case(case, tmp_path)
    part = part if (place / part).is_dir() else next(each.name for each in sorted(place.iterdir()) if each.is_dir())
    assert judge(place / part).verdict == "valid"


def test_a_published_map_made_anew_for_a_warm_start(tmp_path: Path) -> None:
    import numpy as np  # noqa: PLC0415 - this case alone brings arrays of numpy

    case = make_case("B04", tmp_path)
    again = shutil.copytree(case / "start", tmp_path / "again")
    tensors = load_file(again / WEIGHTS)
    tensors |= {name: torch.from_numpy(np.load(case / "new_map" / f"{name}.npy")) for name in ("d2t", "t2d")}
    save_file(tensors, again / WEIGHTS)
    verdict = judge(again, previous=case / "start")
    assert {finding.tensor for finding in verdict.findings if finding.code == "map_changed"} == {"d2t", "t2d"}


def test_published_nonsense_for_draft_vocab_size(tmp_path: Path) -> None:
    case = make_case("B07", tmp_path)
    for number in (0, 1, 2, 3, 5, 6, 7):
        assert "draft_vocab_size" in found(judge(case / f"cfg{number}"), "bad_config").message


def test_a_layer_id_beyond_the_verifier(tmp_path: Path) -> None:
    case = make_case("H08", tmp_path)
    path = case / "range"
    verifier = write_verifier(tmp_path / "verifier")
    assert found(judge(path, verifier=verifier), "aux_id_out_of_range").severity == "error"


def test_peers_checkpoints_at_every_level(tmp_path: Path) -> None:
    for name in ("speculators-0.9.0/0", "specforge-hf", "modelopt", "eagle-official"):
        path = peer_checkpoint(name)
        assert judge_quick(path).verdict == judge(path).verdict == "valid"
