"""Files of every schema version that ever landed load for ever: tests/golden is added to, never remade."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from eagle3_core.checkpoint.format import read_drafter_config, read_drafter_tensors
from eagle3_core.checkpoint.judge import judge
from eagle3_core.checkpoint.tensors import load_pickle
from eagle3_core.contract.drafter_config import expected_tensors
from eagle3_core.contract.events import Event, parse_event
from eagle3_core.contract.spec import JobSpec
from eagle3_core.data.prepared import load_prepared
from eagle3_core.data.store import HiddenStateStore, check_digest
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.vocab_map import load_vocab_map

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("spec-*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_specs(path: Path) -> None:
    spec = JobSpec.read(path)
    assert spec.stage == path.stem
    assert spec.params.stage == path.stem
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_events() -> None:
    lines = [line for path in sorted(GOLDEN.glob("events-*.jsonl")) for line in path.read_bytes().splitlines()]
    found = {type(parse_event(line)) for line in lines}
    assert found == set(get_args(get_args(Event)[0])), "a new type of event needs a golden line"


def test_a_hidden_state_store() -> None:
    store = HiddenStateStore(GOLDEN / "store-1")
    assert (len(store), store.meta.layer_ids, store.meta.last_layer_id, store.meta.last_state) == (
        2,
        (2, 4, 5),
        8,
        "pre_norm",
    )
    row = store.read(1)
    assert row.token_ids_T.tolist() == list(range(4, 12))
    assert row.loss_mask_T.tolist() == [False] * 3 + [True] * 5
    states = torch.cat((row.aux_TAH, row.last_TH[:, None]), dim=1)
    assert torch.equal(states, (torch.arange(1, 8 * 4 * 16 + 1).reshape(8, 4, 16) * 2 / 64).bfloat16())


def test_a_hidden_state_store_in_eight_bits() -> None:
    store = HiddenStateStore(GOLDEN / "store-2")
    assert (store.meta.dtype, store.index.schema_version) == ("float8_e4m3", 2)
    [shard] = store.index.shards
    check_digest(GOLDEN / "store-2" / shard.file, shard)
    row = store.read(1)
    assert row.token_ids_T.tolist() == list(range(4, 12))
    states = torch.cat((row.aux_TAH, row.last_TH[:, None]), dim=1)
    wanted = (torch.arange(8 * 4 * 16 + 1, 2 * 8 * 4 * 16 + 1).reshape(8, 4, 16) % 97 - 48) / 8 + 0.0625
    assert torch.allclose(states.float(), wanted, rtol=1 / 16, atol=0)


def test_a_prepared_directory() -> None:
    manifest, rows = load_prepared(GOLDEN / "prepared-1")
    assert (manifest.lines, manifest.dropped["answer_cut_off"]) == ([1, 3], 1)
    assert [row.token_ids_T.tolist() for row in rows] == [list(range(3, 11)), list(range(4, 12))]
    vocab_map = load_vocab_map(GOLDEN / "prepared-1")
    assert vocab_map.target_ids_D[-1] == 63
    assert vocab_map.coverage == 1.0


def test_a_checkpoint() -> None:
    path = GOLDEN / "checkpoint-1"
    verdict = judge(path)
    assert verdict.verdict == "valid", verdict
    config = read_drafter_config(path).config
    assert (config.aux_layer_ids, config.draft_vocab_size, config.norm_before_residual) == ((2, 4, 5), 24, False)
    tensors = read_drafter_tensors(path)
    assert tensors.keys() == expected_tensors(config).keys()
    Eagle3Drafter(config).load_state_dict(tensors)
    state = load_pickle(path / "optimizer_state_dict.pt")
    assert isinstance(state, dict)
    assert state["param_groups"][0]["param_names"]
