"""Verifiers that broke other tools: each is read, or refused by name."""

from pathlib import Path

import pytest

from eagle3_core.contract.agreement import chosen_layers
from eagle3_core.contract.params import ExtractParams
from eagle3_core.contract.verifier_files import VerifierFiles, read_verifier_files
from eagle3_core.errors import BadInput
from eagle3_core.verifier.tensors import load_verifier_weights
from tests.cases import make_case
from tests.makers import H, V


def codes(files: VerifierFiles) -> list[str]:
    return [code for code, _ in files.warnings]


@pytest.mark.parametrize("case", ["A01", "A02", "A03", "A05", "A06", "A07", "A09", "A12", "A14"])
def test_published_verifiers_are_read(tmp_path: Path, case: str) -> None:
    configs = sorted(make_case(case, tmp_path).rglob("config.json"))
    assert configs
    for config in configs:
        files = read_verifier_files(config.parent)
        assert files.hidden_size == H
        assert "mtp" not in files.embedding.name
        assert load_verifier_weights(files).head.shape == (V, H)


def test_published_traps(tmp_path: Path) -> None:
    listed = read_verifier_files(make_case("A09", tmp_path))
    assert (listed.bos_token_id, listed.eos_token_ids, listed.warnings) == (None, (2, 5, 9), [])
    stray = read_verifier_files(make_case("A12", tmp_path))
    assert (stray.embedding.file.name, codes(stray)) == ("model-00001-of-00001.safetensors", ["unlisted_weight_file"])
    suffixes = read_verifier_files(make_case("A14", tmp_path))
    assert suffixes.embedding.name == "model.language_model.embed_tokens.weight"
    assert suffixes.final_norm.name == "model.language_model.norm.weight"


@pytest.mark.parametrize(
    ("layers", "ids", "instead"), [(1, [2, 0, -2], [0]), (2, [2, 1, -1], [0, 1]), (5, [2, 2, 2], [0, 2, 4])]
)
def test_published_verifiers_too_shallow(tmp_path: Path, layers: int, ids: list[int], instead: list[int]) -> None:
    files = read_verifier_files(make_case("A15", tmp_path) / f"L{layers}")
    params = ExtractParams(verifier=str(files.path), prepared_dir="/prepared")
    with pytest.raises(BadInput) as refused:
        chosen_layers(params, files)
    assert str(refused.value) == (
        f"a verifier of {layers} layers is too shallow for the default aux_layer_ids {ids}; give aux_layer_ids that "
        f"ascend within 0..{layers}, such as {instead}"
    )
    chosen = chosen_layers(params.model_copy(update={"aux_layer_ids": tuple(instead)}), files)
    assert list(chosen) == instead


def test_published_rope_layouts_agree(tmp_path: Path) -> None:
    for config in make_case("A07", tmp_path).rglob("config.json"):
        assert read_verifier_files(config.parent).rope["rope_theta"] == 1e6


@pytest.mark.parametrize(("case", "words"), [("A10", "quantised head not supported"), ("A11", "00002"), ("A13", "LFS")])
def test_published_broken_verifiers_are_refused(tmp_path: Path, case: str, words: str) -> None:
    for config in make_case(case, tmp_path).rglob("config.json"):
        with pytest.raises(BadInput, match=words):
            read_verifier_files(config.parent)
