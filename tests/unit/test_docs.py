"""What the documents say is what the program does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from client.cli import app
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


def test_the_documents_name_commands_and_options_there_are() -> None:
    commands = dict(_commands(get_command(app), ()))
    wrong, named = [], set()
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*.yaml")),
    ):
        for words in re.findall(r"\beyas(?! eyas)((?: +[a-z][a-z-]*)+(?: [^`\n#|]*)?)", _code_of(path)):
            plain = words.split()
            name = next((one for one in (" ".join(plain[:2]), plain[0]) if one in commands), None)
            if name is None:
                wrong.append(f"{path.name}: eyas{words}")
                continue
            named.add(name)
            unknown = [one for one in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", words) if one not in commands[name]]
            wrong += [f"{path.name}: eyas {name} {one}" for one in unknown]
    assert wrong == []
    assert set(commands) - named - {"checkpoint", "data", "pipeline", "token"} == {"openapi"}


def _commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[str, set[str]]]:
    """Each command by its words, with its options."""
    for name, command in group.commands.items():
        options = {word for one in command.params for word in (*one.opts, *one.secondary_opts)}
        yield " ".join((*path, name)), options | {"--help"}
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))


def _code_of(path: Path) -> str:
    """What stands between backticks, in code blocks as well; all of a file that is no Markdown."""
    text = path.read_text()
    if path.suffix != ".md":
        return text
    return "\n".join(block or inline for block, inline in re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", text, re.S))


def test_reasons_in_the_api_document_exist() -> None:
    text = (ROOT / "docs/api.md").read_text().split("Reasons:")[1].split(".")[0]
    assert set(re.findall(r"`([a-z_]+)`", text)) <= {reason.value for reason in Reason}


def test_every_test_that_the_fault_list_names_exists() -> None:
    text = (ROOT / "docs/faults.md").read_text()
    assert re.findall(r"^\| (\d+) \|", text, re.M) == [str(number) for number in range(1, 26)]
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in code] == []
