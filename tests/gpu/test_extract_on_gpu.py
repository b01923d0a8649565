"""Extraction on a GPU: states are copied off by a stream of their own while the next batch runs."""

import pytest
import torch

from eagle3_core.data.store import HiddenStateStore
from tests.unit.core.test_extract_restart import make_prepared
from tests.unit.core.test_stages import Bench

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("device_map", [None, "auto"])
@pytest.mark.parametrize("store_dtype", ["float32", "float8_e4m3"])
def test_a_store_made_on_a_gpu_is_that_made_on_the_cpu(tmp_path, cards, store_dtype, device_map):
    bench = Bench(tmp_path)
    prepared = make_prepared(tmp_path / "prepared", bench.verifier, rows=200)
    order = {"verifier": bench.verifier, "prepared_dir": prepared, "aux_layer_ids": (2, 4, 5), "batch_tokens": 512}
    order |= {"dtype": "float32", "store_dtype": store_dtype, "shard_mb": 1}
    bench.run("extract", **order, device="cpu")
    wanted = HiddenStateStore(bench.out)
    result = bench.run("extract", **order, device="cuda", device_map=device_map)
    assert result.data["verified"]["rows"] == 4
    found = HiddenStateStore(bench.out)
    assert found.entries == wanted.entries
    tolerance = 1e-3 if store_dtype == "float32" else 0.13
    for number in range(len(found)):
        ours, theirs = found.read(number), wanted.read(number)
        assert torch.allclose(ours.aux_TAH.float(), theirs.aux_TAH.float(), rtol=tolerance, atol=tolerance)
        assert torch.allclose(ours.last_TH.float(), theirs.last_TH.float(), rtol=tolerance, atol=tolerance)
