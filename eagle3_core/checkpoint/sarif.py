"""Findings in the Static Analysis Results Interchange Format, for code hosts and CI. Standard library only.

Source: OASIS SARIF 2.1.0; error, warning and info are its levels error, warning and note.
"""

from pathlib import Path
from typing import Any

from eagle3_core.checkpoint.findings import CODES, Finding, Verdict

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_DOCS = "docs/findings.md"


def to_sarif(verdict: Verdict, path: Path, version: str) -> dict[str, Any]:
    """One SARIF log with one run.

    Args:
        verdict: what was found.
        path: what was judged; files are told relative to it.
        version: of the judge.
    """
    used = sorted({finding.code for finding in verdict.findings})
    rules = [
        {
            "id": code,
            "defaultConfiguration": {"level": _LEVELS[CODES[code][0]]},
            "helpUri": f"{_DOCS}#{code}",
            **({"help": {"text": CODES[code][1]}} if CODES[code][1] else {}),
        }
        for code in used
    ]
    base = path if path.is_dir() else path.parent
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "eyas", "version": version, "rules": rules}},
                "originalUriBaseIds": {"CHECKPOINT": {"uri": f"{base.absolute().as_uri()}/"}},
                "results": [_result(finding, used.index(finding.code)) for finding in verdict.findings],
                "properties": {"verdict": verdict.verdict, "level": verdict.level},
            }
        ],
    }


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {"uri": finding.file, "uriBaseId": "CHECKPOINT"}
            if finding.file and not finding.file.startswith("/")
            else {"uri": finding.file or "."}
        }
    }
    if finding.tensor is not None:
        location["logicalLocations"] = [{"name": finding.tensor, "kind": "member"}]
    text = finding.message + (f". {finding.hint}" if finding.hint else "")
    return {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": _LEVELS[finding.severity],
        "message": {"text": text},
        "locations": [location],
    }
