"""Single faults in a sound checkpoint: which are found, by what name, and which cannot be.

    with a manifest     every fault, with the right tensor, key or file
    a foreign one       what names, shapes, map and values tell; some changes of values cannot be told by reading
    beside others       and what the epoch before and the verifier tell of those

300 faults, drawn with a fixed seed, in each situation; 100 changes that mean nothing are no finding worse than info.
"""

import json
import random as randomness
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_core.checkpoint.findings import Verdict
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.headers import read_header
from tests.judging import OPTIMIZER, WEIGHTS
from tests.makers import (
    DRAFTER,
    D,
    H,
    V,
    draft_ids,
    drafter_tensors,
    optimizer_state,
    random,
    write_drafter,
    write_verifier,
)

FAULTS, HARMLESS = 300, 100
MATRICES = ("fc.weight", "lm_head.weight", "layers.0.mlp.up_proj.weight", "layers.0.self_attn.q_proj.weight")
ALIKE = (
    ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
    ("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"),
)

Random = randomness.Random
Change = Callable[[Path, Random], set[str]]
"""Damages a checkpoint; returns the names (tensors, config keys or files) any one of which a finding should name."""


@dataclass(frozen=True)
class Ground:
    """A sound checkpoint as training writes it, the epoch before, and the verifier."""

    checkpoint: Path
    previous: Path
    verifier: Path


def tensors_of(head: Tensor, seed: int) -> dict[str, Tensor]:
    """A drafter whose head began as the verifier's, some steps of training after `seed` 0."""
    base, step = drafter_tensors(), drafter_tensors(seed=200 + seed)
    moved = {
        name: (tensor.float() + 0.05 * seed * step[name].float()).bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in base.items()
    }
    noise = 0.05 * seed * random(D, H, seed=300 + seed, dtype=torch.float32)
    return moved | {
        "lm_head.weight": (head[draft_ids()].float() + noise).bfloat16(),
        "embed_tokens.weight": random(V, H),
    }


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    root = tmp_path_factory.mktemp("ground")
    verifier = write_verifier(root / "verifier")
    head = load_file(verifier / WEIGHTS)["lm_head.weight"]
    previous = write_drafter(root, 0, tensors=tensors_of(head, 1), steps=1)
    tensors = tensors_of(head, 2)
    checkpoint = write_drafter(root, 1, tensors=tensors, optimizer=optimizer_state(tensors, 2), steps=2)
    return Ground(checkpoint, previous, verifier)


def rewrite(change: Callable[[dict[str, Tensor], Random], set[str]]) -> Change:
    """A change of tensors."""

    def apply(path: Path, chance: Random) -> set[str]:
        tensors = load_file(path / WEIGHTS)
        named = change(tensors, chance)
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
        return named

    return apply


def flip(file: Path, place: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def flip_low_bit(path: Path, chance: Random) -> set[str]:
    name, info = chance.choice(
        sorted(item for item in read_header(path / WEIGHTS).tensors.items() if item[1].dtype == "BF16")
    )
    flip(path / WEIGHTS, info.start + 2 * chance.randrange(info.count), chance.randrange(7))
    return {name}


def flip_top_exponent_bit(path: Path, chance: Random) -> set[str]:
    name, info = chance.choice(
        sorted(item for item in read_header(path / WEIGHTS).tensors.items() if item[1].dtype == "BF16")
    )
    flip(path / WEIGHTS, info.start + 2 * chance.randrange(info.count) + 1, 6)
    return {name}


def flip_in_header(path: Path, chance: Random) -> set[str]:
    raw = (path / WEIGHTS).read_bytes()
    # A letter of a name, shape or dtype; in the white space behind the JSON it would mean nothing.
    places = [place for place in range(8, read_header(path / WEIGHTS).data_start) if chr(raw[place]).isalnum()]
    metadata = raw.index(b"__metadata__")
    places = [place for place in places if not metadata <= place < metadata + 40]
    flip(path / WEIGHTS, chance.choice(places), 0)
    return {WEIGHTS}


def flip_in_optimizer(path: Path, chance: Random) -> set[str]:
    file = path / OPTIMIZER
    flip(file, chance.randrange(file.stat().st_size), chance.randrange(8))
    return {OPTIMIZER}


def swap(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    one, other = chance.choice(ALIKE)
    tensors[one], tensors[other] = tensors[other], tensors[one]
    return {one, other}


def rename(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    name = chance.choice(sorted(tensors))
    tensors[f"{name}_old" if chance.random() < 0.5 else f"verifier_{name}"] = tensors.pop(name)
    return {name}


def drop(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    name = chance.choice(sorted(tensors))
    del tensors[name]
    return {name}


def no_number(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    name = chance.choice(MATRICES)
    tensors[name].view(-1)[chance.randrange(tensors[name].numel())] = chance.choice((float("nan"), float("inf")))
    return {name}


def zero_row(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    name = chance.choice(MATRICES)
    tensors[name][chance.randrange(len(tensors[name]))] = 0
    return {name}


def double_row(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    name = chance.choice(MATRICES)
    row = chance.randrange(1, len(tensors[name]))
    tensors[name][row] = tensors[name][row - 1]
    return {name}


def transpose(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    name = chance.choice(MATRICES)
    tensors[name] = tensors[name].T.contiguous()
    return {name}


def shift_ids(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    tensors["d2t"] = tensors["d2t"] + chance.choice((1, -1))
    return {"d2t"}


def permute_map(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    one, other = chance.sample(range(D), 2)
    ids = tensors["d2t"] + torch.arange(D)
    ids[[one, other]] = ids[[other, one]]
    tensors["d2t"] = ids - torch.arange(D)
    return {"d2t", "lm_head.weight"}


def make_absolute(tensors: dict[str, Tensor], _: Random) -> set[str]:
    tensors["d2t"] = tensors["d2t"] + torch.arange(D)
    return {"d2t"}


def flip_mask(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    token = chance.randrange(V)
    tensors["t2d"][token] = ~tensors["t2d"][token]
    return {"t2d", "d2t"}


def roll_head(tensors: dict[str, Tensor], _: Random) -> set[str]:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
    return {"lm_head.weight"}


def scale(tensors: dict[str, Tensor], chance: Random) -> set[str]:
    name = chance.choice(MATRICES)
    tensors[name] *= 16
    return {name}


def edit(path: Path, key: str, value: object) -> set[str]:
    config = json.loads((path / "config.json").read_text())
    place = config
    *outer, last = key.split(".")
    for name in outer:
        place = place[name]
    place[last] = value
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    return {key}


def edit_size(path: Path, chance: Random) -> set[str]:
    key = chance.choice(("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "num_hidden_layers"))
    return edit(path, f"transformer_layer_config.{key}", chance.choice((2, 3, 7))) | {key}


def edit_meaning(path: Path, chance: Random) -> set[str]:
    """A value that fits as well as the right one."""
    key, value = chance.choice(
        (
            ("norm_before_residual", not DRAFTER.norm_before_residual),
            ("norm_output", not DRAFTER.norm_output),
            ("eagle_aux_hidden_state_layer_ids", [3, 5, 6]),
            ("transformer_layer_config.rms_norm_eps", 1e-3),
            ("transformer_layer_config.rope_parameters.rope_theta", 1e4),
        )
    )
    return edit(path, key, value)


def misspell(path: Path, chance: Random) -> set[str]:
    """Another letter in a key for which servers would take a default."""
    config = json.loads((path / "config.json").read_text())
    inner = chance.random() < 0.5
    place = config["transformer_layer_config"] if inner else config
    keys = ("rms_norm_eps", "max_position_embeddings", "rope_parameters") if inner else ("norm_output", "fc_norm")
    key = chance.choice(keys)
    at = chance.randrange(len(key))
    place[f"{key[:at]}#{key[at + 1 :]}"] = place.pop(key)
    (path / "config.json").write_text(json.dumps(config))
    return {key}


def second_file(path: Path, _: Random) -> set[str]:
    shutil.copy(path / WEIGHTS, path / "model-old.safetensors")
    return {"model-old.safetensors"}


def lead_elsewhere(path: Path, _: Random) -> set[str]:
    """An index that has servers load other weights."""
    tensors = {name: tensor + 1 if tensor.dim() == 2 else tensor for name, tensor in load_file(path / WEIGHTS).items()}
    save_file(tensors, path / "other.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "other.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return {"other.safetensors", WEIGHTS}


def edit_ids(path: Path, chance: Random) -> set[str]:
    ids = chance.choice(([2, 2, 5], [5, 4, 2], [2, 4, 5, 8], [2, 4]))
    return edit(path, "eagle_aux_hidden_state_layer_ids", ids) | {"fc.weight", "config.json"}


def edit_vocabulary(path: Path, chance: Random) -> set[str]:
    size = D + chance.choice((-1, 1, V))
    return edit(path, "draft_vocab_size", size) | {"config.json", "lm_head.weight"}


def cut(path: Path, chance: Random) -> set[str]:
    name = chance.choice((WEIGHTS, OPTIMIZER, "config.json", "scheduler_state_dict.pt"))
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: chance.randrange(len(content))])
    return {name}


def stale_optimizer(path: Path, _: Random) -> set[str]:
    torch.save(optimizer_state(load_file(path / WEIGHTS), 1), path / OPTIMIZER)
    return {OPTIMIZER}


KINDS: dict[str, Change] = {
    "low bit": flip_low_bit,
    "exponent bit": flip_top_exponent_bit,
    "header": flip_in_header,
    "optimizer byte": flip_in_optimizer,
    "swapped": rewrite(swap),
    "renamed": rewrite(rename),
    "dropped": rewrite(drop),
    "not finite": rewrite(no_number),
    "zero row": rewrite(zero_row),
    "doubled row": rewrite(double_row),
    "transposed": rewrite(transpose),
    "ids off by one": rewrite(shift_ids),
    "permuted map": rewrite(permute_map),
    "absolute map": rewrite(make_absolute),
    "mask": rewrite(flip_mask),
    "rolled head": rewrite(roll_head),
    "scaled": rewrite(scale),
    "size": edit_size,
    "meaning": edit_meaning,
    "misspelt": misspell,
    "second file": second_file,
    "other index": lead_elsewhere,
    "layer ids": edit_ids,
    "vocabulary size": edit_vocabulary,
    "cut": cut,
    "stale optimizer": stale_optimizer,
}

HIDDEN_ALONE = {"low bit", "swapped", "rolled head", "scaled", "meaning"}
"""Kinds that reading cannot tell in a foreign checkpoint: the values are as good as any."""

HIDDEN_BESIDE_OTHERS = {"low bit"}
"""And beside the epoch before and the verifier: a change within what a step of training does."""

NO_SERVER_FAULT = {"optimizer byte", "stale optimizer"}
"""Kinds that change nothing a server computes. Without a manifest a byte of the optimizer may not be told, since some
mean nothing (padding, dates of the archive); the steps of a stale one agree with each other, and only the epoch before
tells."""


def copied(ground: Ground, place: Path, manifest: bool) -> Path:
    shutil.copytree(ground.checkpoint, place)
    if not manifest:
        (place / "manifest.json").unlink()
    return place


def names(verdict: Verdict, wanted: set[str]) -> bool:
    """Whether a warning or an error names one of these, as tensor, file or key."""
    return any(
        finding.severity != "info"
        and (finding.tensor in wanted or finding.file in wanted or any(name in finding.message for name in wanted))
        for finding in verdict.findings
    )


def spread(ground: Ground, place: Path, manifest: bool, beside: bool) -> tuple[Counter[str], Counter[str]]:
    """(faults made, faults missed) of each kind."""
    chance, made, missed = randomness.Random(8), Counter[str](), Counter[str]()
    kinds = sorted(KINDS)
    for number in range(FAULTS):
        kind = kinds[number % len(kinds)]
        path = copied(ground, place / str(number), manifest)
        wanted = KINDS[kind](path, chance)
        verdict = judge(
            path,
            previous=ground.previous if beside else None,
            verifier=ground.verifier if beside else None,
        )
        made[kind] += 1
        missed[kind] += not names(verdict, wanted)
        shutil.rmtree(path)
    return made, missed


def test_with_a_manifest_every_fault_is_found_by_name(ground: Ground, tmp_path: Path) -> None:
    assert judge(ground.checkpoint, previous=ground.previous, verifier=ground.verifier).verdict == "valid"
    made, missed = spread(ground, tmp_path, manifest=True, beside=False)
    assert (sum(made.values()), +missed) == (FAULTS, Counter())


def test_in_a_foreign_checkpoint_only_equally_good_values_are_missed(ground: Ground, tmp_path: Path) -> None:
    _, missed = spread(ground, tmp_path, manifest=False, beside=False)
    assert set(+missed) - NO_SERVER_FAULT <= HIDDEN_ALONE
    assert all(missed[kind] for kind in HIDDEN_ALONE), "what can be found by now is no longer hidden"


def test_beside_others_all_but_the_smallest_changes_are_found(ground: Ground, tmp_path: Path) -> None:
    _, missed = spread(ground, tmp_path, manifest=False, beside=True)
    assert set(+missed) - {"optimizer byte"} <= HIDDEN_BESIDE_OTHERS


def reorder(path: Path, chance: Random) -> None:
    """Another order of the same bytes, which the library's writer would undo."""
    header = read_header(path / WEIGHTS)
    raw = (path / WEIGHTS).read_bytes()
    order = sorted(header.tensors)
    chance.shuffle(order)
    entries, body = {}, b""
    for name in order:
        info = header.tensors[name]
        piece = raw[info.start : info.end]
        entries[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [len(body), len(body) + len(piece)],
        }
        body += piece
    text = json.dumps(entries).encode()
    (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + body)


def add_metadata(path: Path, chance: Random) -> None:
    save_file(load_file(path / WEIGHTS), path / WEIGHTS, metadata={"format": "pt", "note": f"{chance.random()}"})


def add_document(path: Path, chance: Random) -> None:
    (path / chance.choice(("README.md", "LICENSE", "config.py", "val_metrics.json"))).write_text("{}")


def reorder_config(path: Path, chance: Random) -> None:
    items = list(json.loads((path / "config.json").read_text()).items())
    chance.shuffle(items)
    (path / "config.json").write_text(json.dumps(dict(items), indent=chance.choice((None, 1, 4))))


def note_in_config(path: Path, chance: Random) -> None:
    keys = ("transformers_version", "_commit_hash", "license", "comment")
    inner = ("initializer_range", "attention_dropout", "bos_token_id", "_attn_implementation")
    key, inside = chance.choice((*((key, False) for key in keys), *((key, True) for key in inner)))
    edit(path, f"transformer_layer_config.{key}" if inside else key, 2)


@pytest.mark.parametrize("manifest", [True, False])
def test_changes_that_mean_nothing_are_no_finding_worse_than_info(
    ground: Ground, tmp_path: Path, manifest: bool
) -> None:
    chance = randomness.Random(9)
    changes = (reorder, add_metadata, add_document, reorder_config, note_in_config)
    for number in range(HARMLESS):
        path = copied(ground, tmp_path / str(number), manifest)
        changes[number % len(changes)](path, chance)
        verdict = judge(path, previous=ground.previous, verifier=ground.verifier)
        loud = [finding for finding in verdict.findings if finding.severity != "info"]
        assert (verdict.verdict, loud) == ("valid", [])
        shutil.rmtree(path)
