"""What the documents say is what the program does."""

import re
from pathlib import Path

import pytest

from client.stages import markdown
from eagle3_core.contract.exits import Reason
from eagle3_core.contract.params import STAGES
from server.services.requests import JobRequest
from server.settings import Settings

ROOT = Path(__file__).parents[2]


def test_docs_stages_is_what_eyas_stages_prints() -> None:
    assert (ROOT / "docs/stages.md").read_text() == markdown()


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs/api.md").read_text()
    assert [name for name in Settings.model_fields if f"EYAS_{name.upper()}" not in text] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.json")), ids=lambda path: path.stem)
def test_every_example_is_a_request(path: Path) -> None:
    request = JobRequest.model_validate_json(path.read_text())
    STAGES[request.stage].model_validate(request.params)


def test_the_readme_names_every_make_target_and_no_other() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named == targets


def test_reasons_in_the_api_document_exist() -> None:
    text = (ROOT / "docs/api.md").read_text().split("Reasons:")[1].split(".")[0]
    assert set(re.findall(r"`([a-z_]+)`", text)) <= {reason.value for reason in Reason}


def test_every_test_that_the_fault_list_names_exists() -> None:
    text = (ROOT / "docs/faults.md").read_text()
    assert re.findall(r"^\| (\d+) \|", text, re.M) == [str(number) for number in range(1, 26)]
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in code] == []
