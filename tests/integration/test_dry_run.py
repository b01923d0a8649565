"""A look before the work: what would be stored, what it takes, and what contradicts what. Nothing is stored."""

import json
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from client.http import ApiError
from eagle3_core.contract.verifier_files import tokenizer_fingerprint
from tests import tiny


@pytest.fixture(scope="module")
def inputs(shared):
    """Verifier, store and vocabulary map inside the roots of the shared daemon, and another verifier."""
    daemon, _ = shared
    params = tiny.make_training_inputs(daemon.root / "inputs")
    tiny.make_verifier(daemon.root / "wider", seed=3, num_hidden_layers=9)
    tiny.make_conversations(daemon.root / "conversations.jsonl", 12)
    return daemon, params


def look(daemon, request):
    before = sorted((daemon.state / "jobs").iterdir()), daemon.client.jobs()
    answer = daemon.client.dry_run(request)
    assert answer["dry_run"] is True
    assert (sorted((daemon.state / "jobs").iterdir()), daemon.client.jobs()) == before
    return answer["jobs"]


def refused(daemon, request):
    """What a dry run refuses, and a submit for the same reason."""
    with pytest.raises(ApiError) as dry:
        daemon.client.dry_run(request)
    with pytest.raises(ApiError) as real:
        daemon.client.submit(request)
    assert dry.value.fields == real.value.fields
    assert dry.value.status == 422
    return {one["pointer"]: one["message"] for one in dry.value.fields}


def codes(job):
    return {one["code"]: one for one in job["preflight"]["warnings"]}


def test_a_training_is_shown_with_every_default_and_every_size(inputs):
    daemon, params = inputs
    [job] = look(daemon, {"stage": "train", "params": params, "labels": {"a": "b"}, "max_seconds": 9})
    assert job["params"]["ttt_steps"] == 3
    assert job["params"]["epochs"] == 2
    assert (job["name"], job["labels"], job["max_seconds"], job["on_stall"]) == ("train", {"a": "b"}, 9, "report")
    assert job["retry"]["max_retries"] == 2
    assert job["output_dir"] == params["output_dir"]
    preflight = job["preflight"]
    paths = {path["field"]: (path["role"], path["state"]) for path in preflight["paths"]}
    assert paths["verifier"] == paths["data_dir"] == ("input", "exists")
    assert paths["output_dir"] == ("output", "made by this job")
    assert preflight["verifier"]["hidden_size"] == tiny.HIDDEN
    assert preflight["verifier"]["num_hidden_layers"] == tiny.LAYERS
    numbers = sum(tensor.numel() for tensor in tiny.verifier_tensors().values())
    assert preflight["verifier"]["numbers"] == numbers
    data = preflight["data"]
    assert (data["rows"], data["tokens"], data["longest_row"]) == (8, 8 * 24, 24)
    assert data["layer_ids"] == list(tiny.AUX_LAYER_IDS)
    assert preflight["drafter"]["draft_vocab_size"] == 64
    assert preflight["space"]["bytes"] > preflight["drafter"]["checkpoint_bytes"]
    assert preflight["space"]["free_bytes"] > 0
    assert preflight["gpu_memory"]["bytes"] > 16 * preflight["drafter"]["trained"]
    assert "16 bytes" in preflight["gpu_memory"]["basis"]
    assert preflight["time"]["seconds"] is None
    assert "no earlier train job" in preflight["time"]["basis"]


def test_the_sizes_are_those_the_training_reports_and_then_its_pace_is_known(new_daemon):
    daemon = new_daemon(OMP_NUM_THREADS="1")
    params = tiny.make_training_inputs(daemon.root / "inputs") | {"device": "cpu"}
    request = {"stage": "train", "params": params}
    [job] = look(daemon, request)
    [stored] = daemon.client.submit(request)
    done = daemon.wait_ended(stored["id"], limit_s=120)
    assert done["state"] == "succeeded"
    facts = {fact["title"]: fact["data"] for fact in done["setup"]}
    drafter = job["preflight"]["drafter"]
    assert (drafter["parameters"], drafter["trained"]) == (
        facts["parameters"]["total"],
        facts["parameters"]["trainable"],
    )
    again = {"stage": "train", "params": params | {"output_dir": str(daemon.root / "other"), "epochs": 5}}
    [job] = look(daemon, again)
    time = job["preflight"]["time"]
    tokens = 8 * 24 * 0.75 * 5
    assert time["seconds"] == pytest.approx(tokens / done["tokens_per_s"], abs=0.06)
    assert stored["id"] in time["basis"]


def test_a_chain_is_judged_before_any_of_it_exists(inputs):
    daemon, params = inputs
    root, verifier = daemon.root, params["verifier"]
    conversations = str(root / "conversations.jsonl")
    pipeline = {
        "name": "look",
        "defaults": {"params": {"verifier": verifier}},
        "stages": {
            "prepare": {"params": {"conversations": conversations, "draft_vocab_size": 48, "max_seq_len": 64}},
            "extract": {"params": {"prepared_dir": "${prepare.output_dir}"}},
            "train": {
                "params": {
                    "data_dir": "${extract.output_dir}", "vocab_map_dir": "${prepare.output_dir}", "max_seq_len": 128
                }
            },
            "evaluate": {"params": {"checkpoint": "${train.output_dir}/checkpoint_best", "prompts": conversations}},
        },
    }  # fmt: skip
    prepare, extract, train, evaluate = look(daemon, pipeline)
    first, *others = prepare["preflight"]["preview"]["rows"]
    assert (prepare["preflight"]["preview"]["trouble"], len(others)) == (None, 2)
    assert (first["tokens"], first["left_out"]) == (64, None)
    assert others[0]["row"] == 2
    assert extract["preflight"]["preview"] is None
    assert prepare["output_dir"] is None
    assert extract["depends_on"] == ["prepare"]
    assert train["depends_on"] == ["prepare", "extract"] or train["depends_on"] == ["extract", "prepare"]
    states = {path["field"]: path["state"] for path in train["preflight"]["paths"]}
    assert states["data_dir"] == "made by extract"
    assert train["preflight"]["drafter"]["draft_vocab_size"] == 48
    assert train["preflight"]["data"] is None
    assert "before its data is there" in train["preflight"]["time"]["basis"]
    assert codes(train)["rows_were_cut"]["pointer"] == "/stages/train/params/max_seq_len"
    assert "prompts_were_trained_on" in codes(evaluate)
    assert extract["preflight"]["gpu_memory"]["basis"].startswith("at least")
    pipeline["stages"]["train"]["params"]["aux_layer_ids"] = [1, 2, 3]
    with pytest.raises(ApiError) as error:
        daemon.client.dry_run(pipeline)
    assert error.value.fields[0]["pointer"] == "/stages/train/params/aux_layer_ids"
    del pipeline["stages"]["train"]["params"]["aux_layer_ids"]
    pipeline["stages"]["train"]["params"]["verifier"] = str(root / "wider")
    with pytest.raises(ApiError) as error:
        daemon.client.dry_run(pipeline)
    assert "num_hidden_layers 8, the verifier has 9" in error.value.fields[0]["message"]


def test_the_first_rows_of_a_preparation_are_shown_and_what_is_wrong_with_them(inputs, tmp_path):
    daemon, params = inputs
    source = daemon.root / "odd.jsonl"
    tiny.make_conversations(source, 1)
    with source.open("a") as file:
        file.write('{"messages": [{"role": "narrator", "content": "x"}]}\n[]\n')
    wanted = {"verifier": params["verifier"], "conversations": str(source), "draft_vocab_size": 48}
    request = {"stage": "prepare", "params": wanted}
    [job] = look(daemon, request)
    first, second, third = job["preflight"]["preview"]["rows"]
    assert [text for text, trained in first["parts"] if trained] == ["The number is 0, and 0 it is.<|im_end|>"]
    assert second["left_out"].startswith("unknown_role: message 1 is by 'narrator'")
    assert third["left_out"].startswith("not_a_row: an array")
    file = tmp_path / "request.json"
    file.write_text(json.dumps(request))
    command = daemon.command("submit", "--state", str(daemon.state), "--dry-run", str(file))
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "    | The number is 0, and 0 it is.<|im_end|>" in shown
    assert "line 2: 0 tokens, 0 trained on, left out: unknown_role" in shown
    source.write_bytes(b"\xff\xfe")
    (daemon.root / "damaged.parquet").write_bytes(b"PAR1")
    [job] = look(
        daemon, {"stage": "prepare", "params": wanted | {"conversations": str(daemon.root / "damaged.parquet")}}
    )
    assert "not a Parquet file" in job["preflight"]["preview"]["trouble"]


def test_what_surely_fails_is_refused_at_once(inputs):
    daemon, params = inputs
    root = daemon.root

    def train(**changes):
        return {"stage": "train", "params": params | changes}

    assert "num_hidden_layers" in refused(daemon, train(verifier=str(root / "wider")))["/params/data_dir"]
    assert "hold" in refused(daemon, train(aux_layer_ids=[1, 2, 3]))["/params/aux_layer_ids"]
    assert "vocabulary map has 64" in refused(daemon, train(draft_vocab_size=32))["/params/vocab_map_dir"]
    assert (
        "not a finished hidden-state store"
        in refused(daemon, train(data_dir=params["vocab_map_dir"]))["/params/data_dir"]
    )
    assert "no such file" in refused(daemon, train(vocab_map_dir=params["data_dir"]))["/params/vocab_map_dir"]
    assert "config.json" in refused(daemon, train(finetune_from=params["data_dir"]))["/params/finetune_from"]
    short = tiny.make_store(root / "cut", root / "inputs" / "verifier")
    shard = sorted(short.glob("shard_*"))[-1]
    with shard.open("r+b") as file:
        file.truncate(100)
    assert f"{shard} has 100 bytes" in refused(daemon, train(data_dir=str(short)))["/params/data_dir"]
    shard.unlink()
    assert "lists it; extract again" in refused(daemon, train(data_dir=str(short)))["/params/data_dir"]


def test_what_is_doubtful_is_told_and_accepted(inputs):
    daemon, params = inputs
    root = daemon.root
    [job] = look(daemon, {"stage": "train", "params": params | {"max_seq_len": 16}})
    assert "8 of 8 rows are longer than 16: 64 tokens" in codes(job)["rows_cut"]["message"]
    [job] = look(daemon, {"stage": "train", "params": params | {"max_seq_len": 2048}})
    assert "exactly 24 tokens" in codes(job)["rows_were_cut"]["message"]
    other = tiny.make_verifier(root / "retrained", seed=9, rms_norm_eps=1e-6)
    [job] = look(daemon, {"stage": "train", "params": params | {"verifier": str(other)}})
    assert "verifier_differs" in codes(job)


def test_an_extraction_of_rows_that_do_not_fit_is_refused(inputs):
    daemon, params = inputs
    root = daemon.root
    prepared = root / "prepared by hand"
    prepared.mkdir()
    save_file(
        {
            "input_ids": torch.zeros(700, dtype=torch.int32),
            "loss_mask": torch.ones(700, dtype=torch.bool),
            "offsets": torch.tensor([0, 100, 700]),
        },
        prepared / "rows.safetensors",
    )
    manifest = {
        "verifier": params["verifier"], "tokenizer_fingerprint": tokenizer_fingerprint(root / "inputs" / "verifier"),
        "conversations": "/x", "max_seq_len": 1024, "draft_vocab_size": 64, "tokens": 700, "supervised_tokens": 700,
        "vocab_coverage": 1.0, "dropped": {}, "lines": [1, 2], "prompts": ["a", "b"],
    }  # fmt: skip
    (prepared / "prepared.json").write_text(json.dumps(manifest))
    request = {"stage": "extract", "params": {"verifier": params["verifier"], "prepared_dir": str(prepared)}}
    assert "a row of 600 tokens" in refused(daemon, request)["/params/prepared_dir"]
    manifest["tokenizer_fingerprint"] = "0" * 64
    (prepared / "prepared.json").write_text(json.dumps(manifest))
    assert "not that of" in refused(daemon, request)["/params/prepared_dir"]
    rows = load_file(prepared / "rows.safetensors")
    assert rows["offsets"].tolist() == [0, 100, 700]


def test_the_command_prints_it_for_a_person(inputs, tmp_path):
    daemon, params = inputs
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"stage": "train", "params": params}))
    command = daemon.command("submit", "--state", str(daemon.state), "--dry-run", str(file))
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for words in (
        "train (train)",
        "hidden_size 32",
        "GPU memory",
        "16 bytes",
        "warning [rows_were_cut]",
        "nothing was stored",
    ):
        assert words in shown
