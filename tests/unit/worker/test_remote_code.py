"""Code of a verifier's directory: named, refused, and run when allowed; weights from safetensors alone."""

import json

import pytest
import torch

from eagle3_core.errors import BadInput
from tests import tiny
from worker.hugging_face import load_model
from worker.remote_code import named_code

CPU = torch.device("cpu")


@pytest.mark.usefixtures("code_cache")
def test_a_model_of_its_own_code_is_loaded_only_when_allowed(tmp_path):
    verifier = tiny.make_verifier_with_code(tmp_path / "v")
    with pytest.raises(BadInput, match=r"configuration_own\.py, modeling_own\.py.*allow_remote_code"):
        load_model(verifier, CPU, torch.float32)
    assert not (verifier / "RAN").exists()
    model = load_model(verifier, CPU, torch.float32, allow_remote_code=True)
    assert (verifier / "RAN").exists()
    assert type(model).__name__ == "OwnModel"


def test_code_of_another_repository_is_named_as_such(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}})
    )
    assert named_code(tmp_path) == ["tokenization_kimi.py"]
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "org/repo--modeling.Model"}}))
    with pytest.raises(BadInput, match=r"another repository, org/repo--modeling\.Model"):
        named_code(tmp_path)


def test_weights_are_never_read_from_a_pickle(tmp_path):
    verifier = tiny.make_verifier(tmp_path / "v")
    torch.save(tiny.verifier_tensors(), verifier / "pytorch_model.bin")
    (verifier / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="could not be loaded"):
        load_model(verifier, CPU, torch.float32)
