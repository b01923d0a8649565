"""The GPU memory a dry run tells, against what a training really keeps."""

import pytest
import torch

from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.params import TrainParams
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.training.engine import Document, make_pack, score_pack
from eagle3_core.training.ttt import counted_rows
from server.domain.estimate import kept_for_backward, train_memory
from server.domain.space import size_of


def drafter_config(hidden, intermediate, heads, kv_heads, head_dim, draft_vocab):
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=4000,
        draft_vocab_size=draft_vocab,
        aux_layer_ids=(2, 4, 5),
        rope={"rope_type": "default", "rope_theta": 10_000.0},
    )


def really_kept(config, tokens, ttt_steps):
    """Bytes of every tensor that autograd keeps, parameters left out, each storage once."""
    drafter = Eagle3Drafter(config)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    head = torch.randn(config.draft_vocab_size, config.hidden_size)
    rows = counted_rows(torch.ones(tokens, dtype=torch.bool), ttt_steps)
    hidden = config.hidden_size
    aux, last = torch.randn(tokens, config.num_aux_states, hidden), torch.randn(tokens, hidden)
    document = Document(torch.randint(0, config.vocab_size, (tokens,)), aux, last, rows)
    given = make_pack([document], config, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        score_pack(drafter, lambda states: states @ head.T, given, [1.0] * ttt_steps)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(
    ("sizes", "tokens", "ttt_steps"),
    [
        ((256, 512, 8, 4, 32, 1000), 256, 3),
        ((256, 1024, 8, 8, 32, 500), 512, 1),
        ((128, 256, 4, 2, 32, 3000), 128, 7),
        ((256, 512, 4, 2, 64, 200), 768, 3),
    ],
)
def test_what_a_pack_keeps_is_told_within_a_tenth(sizes, tokens, ttt_steps):
    config = drafter_config(*sizes)
    told = kept_for_backward(config, tokens, ttt_steps)
    assert 0.9 < told / really_kept(config, tokens, ttt_steps) < 1.1


def test_weights_gradients_and_moments_are_sixteen_bytes_a_number():
    config = drafter_config(256, 512, 8, 4, 32, 1000)
    params = TrainParams(verifier="/v", data_dir="/d", vocab_map_dir="/m", max_seq_len=8)
    trained = sum(p.numel() for name, p in Eagle3Drafter(config).named_parameters() if name != "embed_tokens.weight")
    told = train_memory(params, config, size_of(config), embedding_bytes=123_000_000, longest=None)
    assert f"{trained:,} trained numbers x 16 bytes" in told.basis
    assert told.bytes > 16 * trained + 123_000_000
    frozen = train_memory(params.model_copy(update={"train_head": False}), config, size_of(config), 123_000_000, None)
    # No gradient and no moments, but still the weights.
    assert told.bytes - frozen.bytes == 12 * 1000 * 256
