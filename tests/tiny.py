"""Makers of tiny real inputs: a verifier, conversations, a hidden-state store, a vocabulary map."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eagle3_core.contract.store_files import StoreMeta
from eagle3_core.contract.verifier_files import config_fingerprint, read_verifier_files, tokenizer_fingerprint
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.data.store_writer import UnfinishedStore, stored_form
from eagle3_core.model.vocab_map import build_vocab_map, save_vocab_map
from eagle3_core.verifier.tensors import output_fingerprint

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 8, 4, 2, 8
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIAL)
AUX_LAYER_IDS = (2, 4, 5)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def verifier_config(**changes: Any) -> dict[str, Any]:
    """config.json of the tiny verifier."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 256,
        "eos_token_id": 258,
        "tie_word_embeddings": False,
        "dtype": "float32",
    } | changes


def verifier_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the tiny verifier, by its transformers name."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    tensors = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN), "lm_head.weight": weight(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN) + weight(HIDDEN)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    return tensors


def make_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: id = byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def make_verifier(directory: Path, seed: int = 0, **config: Any) -> Path:
    """A complete verifier directory that transformers can load."""
    directory.mkdir(parents=True)
    make_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(verifier_config(**config)))
    save_file(verifier_tensors(seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_verifier_with_code(directory: Path) -> Path:
    """A verifier whose classes are in Python files of its own; the file RAN appears when they are run."""
    make_verifier(directory)
    config = verifier_config(model_type="own_kind")
    config["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "configuration_own.py").write_text(
        f"from pathlib import Path\nfrom transformers import LlamaConfig\nPath({str(directory / 'RAN')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_kind'\n"
    )
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer["tokenizer_class"] = "OwnTokenizer"
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (directory / "tokenization_own.py").write_text(
        f"from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\n"
        f"Path({str(directory / 'RAN')!r}).touch()\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    (directory / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return directory


def make_python_tokenizer(directory: Path) -> Path:
    """A tokenizer in Python that tells no offsets, its tokens two bytes each, so that they cut characters."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PairTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_pair.PairTokenizer", None]},
        "eos_token": SPECIAL[2],
        "extra_special_tokens": [SPECIAL[1]],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (directory / "tokenization_pair.py").write_text(
        "from transformers import PreTrainedTokenizer\n"
        "class PairTokenizer(PreTrainedTokenizer):\n"
        "    vocab_size = 256 + 256 * 256\n"
        "    def get_vocab(self):\n"
        "        return dict(self.added_tokens_encoder)\n"
        "    def _tokenize(self, text):\n"
        "        data = text.encode()\n"
        "        return [data[i : i + 2].decode('latin-1') for i in range(0, len(data), 2)]\n"
        "    def _convert_token_to_id(self, token):\n"
        "        data = token.encode('latin-1')\n"
        "        return data[0] if len(data) == 1 else 256 + data[0] * 256 + data[1]\n"
        "    def _convert_id_to_token(self, index):\n"
        "        data = [index] if index < 256 else divmod(index - 256, 256)\n"
        "        return bytes(data).decode('latin-1')\n"
        "    def convert_tokens_to_string(self, tokens):\n"
        "        return ''.join(tokens).encode('latin-1').decode('utf-8', errors='replace')\n"
    )
    return directory


def make_conversations(path: Path, count: int = 8) -> Path:
    """JSONL conversations with distinct prompts."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Say the number {number}."},
                {"role": "assistant", "content": f"The number is {number}, and {number} it is."},
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_store(
    directory: Path, verifier: Path, rows: int = 8, length: int = 24, shard_bytes: int = 20_000, **meta: Any
) -> Path:
    """A store of random states, or the rest of one; the second half of each row is supervised."""
    directory.mkdir(parents=True, exist_ok=True)
    files = read_verifier_files(verifier)
    values: dict[str, Any] = {
        "verifier": str(verifier),
        "config_fingerprint": config_fingerprint(verifier),
        "output_fingerprint": output_fingerprint(files),
        "tokenizer_fingerprint": tokenizer_fingerprint(verifier),
        "hidden_size": files.hidden_size,
        "num_hidden_layers": files.num_hidden_layers,
        "vocab_size": files.vocab_size,
        "layer_ids": AUX_LAYER_IDS,
        "last_layer_id": files.num_hidden_layers,
        "dtype": "bfloat16",
    }
    full = StoreMeta(**(values | meta))
    generator = torch.Generator().manual_seed(1)
    numbered, stored = [], []
    for row in range(rows):
        ids = torch.randint(0, min(256, files.vocab_size), (length,), generator=generator)
        mask = torch.arange(length) >= length // 2
        states = torch.randn(length, len(full.layer_ids) + 1, full.hidden_size, generator=generator)
        numbered.append((row, TokenRow(ids, mask, f"prompt-{row}")))
        stored.append(stored_form(states, full))
    together = -(-shard_bytes // stored[0][0].nbytes)
    plan = [numbered[first : first + together] for first in range(0, rows, together)]
    store = UnfinishedStore(directory, full, plan)
    for number in store.missing:
        writer = store.begin(number)
        for row, _ in plan[number]:
            writer.write(*stored[row])
        store.end(number, writer)
    store.finish()
    return directory


def make_vocab_map(directory: Path, store: Path, size: int = 64, always: tuple[int, ...] = (258,)) -> Path:
    """The draft vocabulary of a store's supervised tokens."""
    directory.mkdir(parents=True)
    opened = HiddenStateStore(store)
    ids = torch.cat([tokens[mask] for tokens, mask in opened.masks()])
    counts = torch.bincount(ids, minlength=opened.meta.vocab_size)
    save_vocab_map(directory, build_vocab_map(counts, size, always))
    return directory


def make_training_inputs(directory: Path, rows: int = 8, length: int = 24) -> dict[str, Any]:
    """Verifier, store and vocabulary map; returns the train parameters that name them."""
    verifier = make_verifier(directory / "verifier")
    store = make_store(directory / "store", verifier, rows, length)
    vocab_map = make_vocab_map(directory / "prepared", store)
    return {
        "verifier": str(verifier),
        "data_dir": str(store),
        "vocab_map_dir": str(vocab_map),
        "output_dir": str(directory / "checkpoints"),
        "epochs": 2,
        "lr": 1e-3,
        "max_seq_len": 64,
        "batch_tokens": 1,
        "val_ratio": 0.25,
    }


def spoil_shard(store: Path, number: int, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of one shard, and its size in the index; returns the shard."""
    index = json.loads((store / "index.json").read_text())
    shard = index["shards"][number]
    file = store / str(shard["file"])
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    shard["bytes"] = file.stat().st_size
    (store / "index.json").write_text(json.dumps(index))
    return file
