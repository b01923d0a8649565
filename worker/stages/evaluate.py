"""evaluate: acceptance length of a drafter, by walk over hidden states and by real speculative decoding."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3_core.checkpoint.drafter import load_drafter
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.jobdir import write_json
from eagle3_core.contract.params import EvaluateParams
from eagle3_core.contract.verifier_files import VerifierFiles, read_verifier_files
from eagle3_core.data.conversations import Conversation
from eagle3_core.errors import BadData, BadInput, BadRow, GateNotMet, InvalidCheckpoint
from eagle3_core.evaluation.rounds import RoundCounts
from eagle3_core.evaluation.speculate import decode_greedy, decode_speculative
from eagle3_core.evaluation.walk import walk
from worker.context import StageContext, StageResult
from worker.conversation_files import read_conversations
from worker.device import pick_device
from worker.hugging_face import HuggingFaceSession, HuggingFaceTokenizer, capture_states, load_model
from worker.progress import Progress
from worker.remote_code import report_code


def run(context: StageContext) -> StageResult:
    """Decode every prompt plainly and speculatively, and walk over the plain text."""
    params = context.params
    assert isinstance(params, EvaluateParams)
    context.phase("loading")
    verifier = Path(params.verifier)
    files = read_verifier_files(verifier)
    for code, message in files.warnings:
        context.warn(code, message)
    if params.allow_remote_code:
        report_code(context, verifier)
    tokenizer = HuggingFaceTokenizer(verifier, params.allow_remote_code)
    prompts = read_prompts(Path(params.prompts), tokenizer, params.max_prompts)
    _check_request(params, files, prompts)
    device = pick_device(params.device)
    drafter = load_drafter(Path(params.checkpoint), files, device)
    aux_ids = drafter.config.aux_layer_ids
    if aux_ids is None:
        raise BadInput(f"{params.checkpoint}: config.json states no aux layer ids, so its states are unknown")
    # float32 on both sides: in bfloat16 a verifier's own argmax changes with the number of tokens in a pass.
    model = load_model(verifier, device, torch.float32, params.allow_remote_code)

    context.phase("decoding")
    stop_ids = set(files.eos_token_ids) | set(tokenizer.stop_ids)
    totals = Totals(params.speculative_tokens)
    progress = Progress(context, len(prompts), "prompts")
    with capture_states(model, aux_ids) as states:
        for number, prompt in enumerate(prompts):
            context.check_stop()
            plain = decode_greedy(HuggingFaceSession(model, aux_ids, states), prompt, params.max_new_tokens, stop_ids)
            ids = torch.tensor([*prompt, *plain.new_ids], device=device)
            walked = walk(drafter, ids, len(prompt), plain.aux_TAH, params.speculative_tokens)
            new_ids, decoded = decode_speculative(
                HuggingFaceSession(model, aux_ids, states),
                drafter,
                prompt,
                params.max_new_tokens,
                stop_ids,
                params.speculative_tokens,
            )
            totals.add(walked, decoded, new_ids == plain.new_ids, len(new_ids))
            if new_ids != plain.new_ids:
                context.warn("text_differs", f"prompt {number + 1}: speculative and plain greedy text differ")
            progress.step(len(new_ids))

    data = totals.to_dict()
    write_json(context.output_dir / "acceptance.json", data)
    print(
        f"acceptance length: {data['tau_decoding']:.3f} by decoding, {data['tau_walk']:.3f} by walk; "
        f"{data['prompts_identical']} of {data['prompts_decoded']} texts identical",
        flush=True,
    )
    if params.min_acceptance_length is not None and data["tau_decoding"] < params.min_acceptance_length:
        raise GateNotMet(
            f"acceptance length {data['tau_decoding']:.3f} is below min_acceptance_length "
            f"{params.min_acceptance_length}"
        )
    return StageResult(data, {"acceptance": str(context.output_dir / "acceptance.json")})


def _check_request(params: EvaluateParams, files: VerifierFiles, prompts: list[list[int]]) -> None:
    """Refuse texts longer than the verifier is made for, and a drafter that is judged invalid beside it."""
    longest = max(len(prompt) for prompt in prompts) + params.max_new_tokens
    if longest > files.max_position_embeddings:
        raise BadInput(
            f"{params.prompts}: the longest prompt and max_new_tokens {params.max_new_tokens} make {longest} tokens, "
            f"the verifier is made for {files.max_position_embeddings}"
        )
    verdict = judge(Path(params.checkpoint), verifier=Path(params.verifier))
    if not verdict.usable:
        raise InvalidCheckpoint(f"{params.checkpoint} is {verdict.verdict}: {verdict.errors()}")


@dataclass
class Totals:
    """Both counts over all prompts."""

    speculative_tokens: int
    prompts: int = 0
    identical: int = 0
    tokens: int = 0
    walked: RoundCounts = field(init=False)
    decoded: RoundCounts = field(init=False)

    def __post_init__(self) -> None:
        self.walked = RoundCounts(self.speculative_tokens)
        self.decoded = RoundCounts(self.speculative_tokens)

    def add(self, walked: RoundCounts, decoded: RoundCounts, identical: bool, tokens: int) -> None:
        """Take in one prompt."""
        self.prompts += 1
        self.identical += identical
        self.tokens += tokens
        self.walked.add(walked)
        self.decoded.add(decoded)

    def to_dict(self) -> dict[str, Any]:
        """The job's result."""
        return {
            "tau_walk": self.walked.acceptance_length,
            "tau_decoding": self.decoded.acceptance_length,
            "rounds_walk": self.walked.rounds,
            "rounds_decoding": self.decoded.rounds,
            "acceptance_per_position": self.decoded.acceptance_rates,
            "speculative_tokens": self.speculative_tokens,
            "prompts_decoded": self.prompts,
            "prompts_identical": self.identical,
            "new_tokens": self.tokens,
        }


def read_prompts(path: Path, tokenizer: HuggingFaceTokenizer, limit: int) -> list[list[int]]:
    """Token ids of the first prompts of a file, each cut before its last assistant turn.

    Raises:
        BadData: the file holds no prompt, or a line that is none.
    """
    prompts = []
    for line, row in read_conversations(path):
        where = f"{path}, line {line}"
        if not isinstance(row, Conversation):
            raise BadData(f"{where}: tokenised before; prompts are messages")
        turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        asked = Conversation(row.messages[: turns[-1]] if turns else row.messages, row.tools)
        if not asked.messages:
            raise BadData(f"{where}: begins with an assistant message; give the user's turn first")
        try:
            prompts.append(tokenizer.encode(tokenizer.render(asked, True)))
        except BadRow as error:
            raise BadData(f"{where}: {error}") from error
        if len(prompts) == limit:
            break
    if not prompts:
        raise BadData(f"{path} holds no prompt")
    return prompts
