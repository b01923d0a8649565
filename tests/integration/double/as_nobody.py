"""What the daemon and the worker say of paths, as the user this runs as: python -P as_nobody.py PLACE CASE."""

import json
import sys
from pathlib import Path

from eagle3_core.contract.params import ValidateParams
from eagle3_core.errors import BadInput
from server.services.paths import PathRules
from server.services.preflight import check_content
from server.settings import Settings
from worker.run import claim

place, case = Path(sys.argv[1]), Path(sys.argv[2])


def checkpoint(name: str) -> ValidateParams:
    return ValidateParams(checkpoint=str(case / name / "0"))


rules = PathRules(Settings(state=place / "state", roots=(case,)))
told = {
    "output": rules.unwritable(str(case / "out_ro" / "new"), {}),
    "existing output": rules.unwritable(str(case / "out_ro"), {}),
    "checkpoint": [fault.message for fault in check_content(checkpoint("locked"), "")],
    "readable": [fault.message for fault in check_content(checkpoint("readable"), "")],
    "hidden": rules.unreadable(str(case / "hidden" / "0"), []),
}
try:
    claim(case / "out_ro" / "new", "job")
except BadInput as error:
    told["at start"] = str(error)
sys.stdout.write(json.dumps(told))
