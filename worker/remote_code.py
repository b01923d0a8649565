"""Python code that a verifier's directory brings along, named by `auto_map` in its configuration files.

transformers imports such files, with everything this process may do. That happens only where the request says
`allow_remote_code`, which the daemon refuses unless its operator allowed it; and it is written down which files, with
their digests, so that what ran can be looked at later.
"""

import hashlib
from pathlib import Path

from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.errors import BadInput
from worker.context import StageContext

TOKENIZER_CONFIGS = ("tokenizer_config.json", "config.json")
MODEL_CONFIGS = ("config.json",)


def named_code(directory: Path, configs: tuple[str, ...] = TOKENIZER_CONFIGS) -> list[str]:
    """The Python files `auto_map` names in these configuration files.

    Raises:
        BadInput: a configuration is damaged, or names code of another repository, which would have to be fetched.
    """
    modules: set[str] = set()
    for name in configs:
        if not (directory / name).is_file():
            continue
        auto_map = read_json_object(directory / name).get("auto_map")
        for value in auto_map.values() if isinstance(auto_map, dict) else ():
            for reference in value if isinstance(value, list) else [value]:
                if not isinstance(reference, str):
                    continue
                if "--" in reference:
                    raise BadInput(f"{directory / name}: auto_map names code of another repository, {reference}")
                modules.add(reference.rpartition(".")[0].replace(".", "/") + ".py")
    return sorted(modules)


def refuse_code(directory: Path, configs: tuple[str, ...], allowed: bool) -> None:
    """Say that what could not be loaded needs code which was not allowed to run.

    Raises:
        BadInput: it does.
    """
    if allowed or not (files := named_code(directory, configs)):
        return
    raise BadInput(
        f"{directory}: cannot be loaded without running the code it brings ({', '.join(files)}). Read that code; to "
        "have it run, submit again with allow_remote_code: true; the daemon must have EYAS_ALLOW_REMOTE_CODE=1 as well "
        "(`eyas data preview` takes --allow-remote-code)"
    )


def report_code(context: StageContext, directory: Path) -> None:
    """Write down which code of a verifier's directory may run from now on: every Python file of it, with its digest."""
    named = named_code(directory)
    if not named:
        context.warn("no_remote_code", f"allow_remote_code is set, but {directory} names no code of its own")
        return
    digests = {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*.py"))
    }
    shown = ", ".join(f"{name} (sha256 {digest[:12]})" for name, digest in digests.items())
    context.report("code of the verifier that may run", shown, named=named, sha256=digests)
