"""What a verifier gives is looked at on the way in: which tokens, which layers, which values; some of it twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.errors import BadData, BadInput
from tests import tiny
from tests.unit.core.test_stages import Bench, prepare
from worker import states
from worker.hugging_face import capture_states, load_model
from worker.stages import extract
from worker.states import StateReader

CPU = torch.device("cpu")
LAYERS = (2, 4, 5, 8)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    return tiny.make_verifier(tmp_path / "v" / "verifier")


def rows(*lengths: int) -> list[TokenRow]:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 256, (length,), generator=generator) for length in lengths]
    return [TokenRow(row, torch.ones(len(row), dtype=torch.bool), "p") for row in ids]


def read(model: nn.Module, batch: list[TokenRow]) -> torch.Tensor:
    """[N, L, H] by way of a reader."""
    shape = (sum(len(row.token_ids_T) for row in batch), len(LAYERS), tiny.HIDDEN)
    return StateReader(model, LAYERS, CPU).read(batch, range(len(batch)), lambda: torch.full(shape, torch.nan))


def wanted_states(model: nn.Module, row: TokenRow) -> torch.Tensor:
    """[T, L, H] of one row alone."""
    with torch.inference_mode(), capture_states(model, LAYERS) as found:
        model(input_ids=row.token_ids_T[None], use_cache=False)
        return torch.stack([found[layer][0] for layer in LAYERS], dim=1)


def test_states_of_a_padded_batch_are_those_of_each_row_alone(verifier: Path) -> None:
    model = load_model(verifier, CPU, torch.float32)
    batch = rows(40, 17, 3, 40)
    out = read(model, batch)
    alone = torch.cat([wanted_states(model, row) for row in batch])
    assert torch.allclose(out, alone, atol=1e-5)


def test_neither_norm_nor_head_is_run_and_no_hook_is_left(verifier: Path) -> None:
    model = load_model(verifier, CPU, torch.float32)
    ran: list[str] = []
    for name in ("model.norm", "lm_head"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    read(model, rows(9))
    assert ran == []
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64))
    assert ran == ["model.norm", "lm_head"]


def test_layers_that_accelerate_loads_when_they_run_give_the_same(verifier: Path) -> None:
    """Its hooks move a layer's weights and inputs to where the layer runs, as with a verifier on several GPUs."""
    model = load_model(verifier, CPU, torch.float32)
    [row] = rows(21)
    wanted = wanted_states(model, row)
    spread = accelerate.cpu_offload(load_model(verifier, CPU, torch.float32), CPU)
    assert next(spread.get_submodule("model.layers.3").parameters()).device.type == "meta"
    for _ in range(2):
        assert torch.equal(read(spread, [row]), wanted)


def test_a_verifier_spread_by_device_map_extracts_the_same(bench: Bench) -> None:
    prepared = prepare(bench)
    order = {"verifier": bench.verifier, "prepared_dir": prepared, "aux_layer_ids": (2, 4, 5), "device": "cpu"}
    bench.run("extract", **order)
    plain = (bench.out / "shard_00000.safetensors").read_bytes()
    bench.run("extract", **order, device_map="auto")
    assert (bench.out / "shard_00000.safetensors").read_bytes() == plain


Change = Callable[[nn.Module], object]


def replace_layer(model: nn.Module) -> None:
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[4] = layers[2]


def spoil_output(value: float) -> Change:
    """One number of layer 3's output, hence of the state entering layer 4, in the third row of a batch."""

    def spoil(_module: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        if len(output) > 2:
            output[2, 5, 7] = value
        return output

    return lambda model: model.get_submodule("model.layers.3").register_forward_hook(spoil)


def other_ids(model: nn.Module) -> None:
    model.get_submodule("model.embed_tokens").register_forward_pre_hook(
        lambda _, given: (torch.cat((given[0][:, :4], given[0][:, 4:].flip(1)), dim=1),)
    )


def one_short(model: nn.Module) -> None:
    model.get_submodule("model.layers.7").register_forward_hook(lambda _, __, output: output[:, 1:])


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (one_short, BadData, r"gave 52\d states of size 32 entering layer 8, expected 53\d of size 32"),
        (spoil_output(torch.nan), BadData, r"row \d+: 1 NaN and 0 Inf among the states of layer 4"),
        (spoil_output(torch.inf), BadData, r"row \d+: 0 NaN and 1 Inf among the states of layer 4"),
        (other_ids, BadData, r"row \d+: the states are those of another text: token 4 is \d+, the row has \d+ there"),
        (replace_layer, BadInput, r"gave the states entering layers \[2, 4, 2, 4, 5, 8\], wanted once each and in or"),
    ],
)
def test_states_that_are_not_what_was_asked_for_end_the_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: Change, error: Any, said: str
) -> None:
    prepared = prepare(bench)

    def changed(*given: Any) -> nn.Module:
        model = load_model(*given)
        change(model)
        return model

    monkeypatch.setattr(extract, "load_model", changed)
    monkeypatch.setattr(extract, "check_logits", lambda *_: None)
    with pytest.raises(error, match=said):
        bench.run("extract", verifier=bench.verifier, prepared_dir=prepared, aux_layer_ids=(2, 4, 5), device="cpu")
    assert not list(bench.out.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("input_ids", tiny.VOCAB, r"out, row 0: token ids from \d+ to 259, the verifier has 259 tokens"),
        ("input_ids", -1, r"out, row 0: token ids from -1 to \d+, the verifier has 259 tokens"),
        ("loss_mask", 0, r"out: not a token of its 8 rows is trained on"),
    ],
)
def test_rows_that_no_verifier_can_run_or_nobody_learn_from_are_refused(
    bench: Bench, name: str, value: int, said: str
) -> None:
    prepared = prepare(bench)
    tensors = load_file(prepared / "rows.safetensors")
    tensors[name][slice(5, 6) if name == "input_ids" else slice(None)] = value
    save_file(tensors, prepared / "rows.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadData, match=said):
        bench.run("extract", verifier=bench.verifier, prepared_dir=prepared)


class OneLayerOn(StateReader):
    """Takes the states entering the next layer."""

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...], device: torch.device) -> None:
        super().__init__(model, (*(layer + 1 for layer in layer_ids[:-1]), layer_ids[-1]), device)


class RowsTurned(StateReader):
    """Takes the last row for the first."""

    def read(self, rows: Any, numbers: Any, place: Any) -> torch.Tensor:
        return super().read(rows, numbers, place).roll(9, 0)


@pytest.mark.parametrize(("reader", "layer"), [(OneLayerOn, 2), (RowsTurned, 2)])
def test_rows_computed_once_more_show_states_of_another_layer_or_row(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, reader: type[StateReader], layer: int
) -> None:
    prepared = prepare(bench)
    order = {"verifier": bench.verifier, "prepared_dir": prepared, "aux_layer_ids": (2, 4, 5), "device": "cpu"}
    result = bench.run("extract", **order, verify_rows=5)
    verified = result.data["verified"]
    assert (verified["rows"], verified["way"]) == (5, "row alone, output_hidden_states")
    assert verified["worst"] < verified["tolerance"] == 0.05
    assert [event["phase"] for event in bench.events("phase")][-1] == "verifying"
    monkeypatch.setattr(extract, "StateReader", reader)
    with pytest.raises(BadData, match=rf"row \d+: the states of layer {layer} are \d.*% off.*5.00% are allowed"):
        bench.run("extract", **order)
    assert not (bench.out / "index.json").exists()
    assert bench.run("extract", **order, verify_rows=0).data["verified"] is None


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
@pytest.mark.parametrize("store_dtype", ["float32", "bfloat16", "float8_e4m3"])
def test_every_pair_of_dtypes_agrees_with_itself(bench: Bench, dtype: str, tolerance: float, store_dtype: str) -> None:
    result = bench.run(
        "extract",
        verifier=bench.verifier,
        prepared_dir=prepare(bench),
        aux_layer_ids=(2, 4, 5),
        dtype=dtype,
        store_dtype=store_dtype,
        verify_rows=100,
    )
    assert result.data["verified"]["rows"] == 8
    assert result.data["verified"]["tolerance"] >= tolerance
    store = HiddenStateStore(bench.out)
    assert store.meta.dtype == store_dtype
    assert len(store) == 8


def test_a_verifier_without_a_list_of_states_is_compared_row_by_row(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_list(*given: Any) -> nn.Module:
        model = load_model(*given)
        model.register_forward_hook(lambda _, __, output: output.__setitem__("hidden_states", None))
        return model

    monkeypatch.setattr(extract, "load_model", without_list)
    order = {"verifier": bench.verifier, "prepared_dir": prepare(bench), "aux_layer_ids": (2, 4, 5), "device": "cpu"}
    assert bench.run("extract", **order).data["verified"]["way"] == "row alone"
    read = states.StateReader.read

    def batches_turned(reader: StateReader, rows: Any, numbers: Any, place: Any) -> torch.Tensor:
        found = read(reader, rows, numbers, place)
        return found if len(rows) == 1 else found.roll(9, 0)

    monkeypatch.setattr(StateReader, "read", batches_turned)
    with pytest.raises(BadData, match=r"states of layer 2 are \d.*% off"):
        bench.run("extract", **order)
