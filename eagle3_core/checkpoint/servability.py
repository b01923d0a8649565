"""Whether speculators, vLLM and SGLang would serve a drafter as it was trained: the rules, applied.

a rule that refuses applies          refuses
else one that spoils                 loads_wrongly
else                                 loads            (notes say what it depends on)
"""

from pathlib import Path

from eagle3_core.checkpoint.findings import Outcome, Reason, Report, Servability, Server
from eagle3_core.checkpoint.judge_verifier import VerifierParts
from eagle3_core.checkpoint.server_rules import RULES, VERSIONS
from eagle3_core.checkpoint.serving_facts import Facts, facts_of
from eagle3_core.checkpoint.weights import DrafterWeights
from eagle3_core.contract.drafter_files import DrafterSource
from eagle3_core.contract.plain import plain


def judge_servers(
    source: DrafterSource,
    weights: DrafterWeights,
    verifier: VerifierParts | None,
    *,
    map_sound: bool = True,
    embedding_differs: bool = False,
) -> tuple[Servability, ...]:
    """What each server would do with a drafter; arguments as `facts_of`."""
    facts = facts_of(source, weights, verifier, map_sound, embedding_differs)
    return tuple(_evaluate(server, facts) for server in VERSIONS)


def tell_servers(
    report: Report,
    file: Path,
    source: DrafterSource,
    weights: DrafterWeights,
    verifier: VerifierParts | None,
    *,
    map_sound: bool = True,
    embedding_differs: bool = False,
) -> None:
    """Put the servers' outcomes into a report, and a finding on `file`, its config, where none of them is good."""
    report.servers = judge_servers(source, weights, verifier, map_sound=map_sound, embedding_differs=embedding_differs)
    known = any(finding.severity == "error" for finding in report.findings)
    if known or any(server.outcome == "loads" for server in report.servers):
        return
    reasons: dict[str, list[str]] = {}
    for server in report.servers:
        why = next(reason.message for reason in server.reasons if reason.effect != "note")
        reasons.setdefault(why, []).append(server.server)
    named = "; ".join(f"{', '.join(servers)}: {why}" for why, servers in reasons.items())
    report.add("not_served", f"no server would serve it right: {named}", file=file)


def _evaluate(server: Server, facts: Facts) -> Servability:
    reasons = tuple(
        Reason(
            rule.code,
            rule.effect,
            plain(message),
            rule.fix,
            rule.source,
            "provoked" if server in rule.provoked else "source",
        )
        for rule in RULES
        if server in rule.servers and (message := rule.when(facts)) is not None
    )
    effects = {reason.effect for reason in reasons}
    outcome: Outcome = "refuses" if "refuses" in effects else "loads_wrongly" if "loads_wrongly" in effects else "loads"
    return Servability(server, VERSIONS[server], outcome, reasons)
