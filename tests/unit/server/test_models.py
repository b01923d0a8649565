"""A model directory is read again as soon as anything in it changes, and not before."""

import pytest

from eagle3_core.errors import BadInput
from server.services import models
from tests import tiny


def test_a_change_is_seen_and_no_change_is_not_read_again(tmp_path, monkeypatch):
    verifier = tiny.make_verifier(tmp_path / "v")
    reads = []
    real = models.read_verifier_files
    monkeypatch.setattr(models, "read_verifier_files", lambda path: reads.append(path) or real(path))
    assert models.read_verifier(verifier).hidden_size == tiny.HIDDEN
    assert models.read_verifier(verifier).hidden_size == tiny.HIDDEN
    assert len(reads) == 1
    numbers = sum(tensor.numel() for tensor in tiny.verifier_tensors().values())
    assert models.count_numbers(verifier) == models.count_numbers(verifier) == numbers
    config = verifier / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 256'))
    assert models.read_verifier(verifier).max_position_embeddings == 256
    (verifier / "model.safetensors").unlink()
    for read in (models.read_verifier, models.count_numbers):
        with pytest.raises(BadInput):
            read(verifier)
    (verifier / "dangling").symlink_to("nowhere")
    for read in (models.read_verifier, models.count_numbers):
        with pytest.raises(BadInput):
            read(verifier)
