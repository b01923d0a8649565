"""Layer ids in SGLang's convention, which depends on the verifier's family. Standard library only.

    family                              ids in eagle_config mean
    DeepSeek, Kimi, glm4_moe_lite       outputs of layers where the first is 1 (state k + 1), else states
    gpt_oss                             states where the largest is N, else outputs of layers
    every other                         outputs of layers

State k is the residual stream after k of N layers. Ids that begin with 1 mean the same in every family; so do none:
the states 2, N//2, N-3.

Source: SGLang 0.5.23, set_eagle3_layers_to_capture of each model.
"""

from collections.abc import Sequence

States = tuple[int, ...]

_DEEPSEEK = ("deepseek", "kimi", "glm4_moe_lite", "glm4moelite")
_GPT_OSS = ("gpt_oss", "gptoss")


def default_states(layers: int) -> States:
    """What every server feeds where it finds no ids, given the verifier's number of layers."""
    return (2, layers // 2, layers - 3)


def sglang_states(ids: Sequence[int], family: str, layers: int | None) -> States | None:
    """The states SGLang feeds for the ids in eagle_config; None where that depends on a family that is not known.

    Args:
        ids: as they stand in eagle_config.
        family: the verifier's model_type or architecture in small letters; empty: not known.
        layers: the verifier's number of layers; None: not known.
    """
    as_they_are, one_up = tuple(ids), tuple(k + 1 for k in ids)
    if not family:
        return one_up if ids[0] == 1 else None
    if family.startswith(_DEEPSEEK):
        return one_up if ids[0] == 1 else as_they_are
    return as_they_are if family.startswith(_GPT_OSS) and max(ids) == layers else one_up


def sglang_ids(states: Sequence[int] | None, family: str, layers: int | None) -> list[int] | None:
    """The ids with which SGLang feeds these states; None where there are none, or none are asked for."""
    if states is None:
        return None
    for ids in ([k - 1 for k in states], list(states)):
        if min(ids) >= 0 and sglang_states(ids, family, layers) == tuple(states):
            return ids
    return None
