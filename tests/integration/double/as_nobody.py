"""What the daemon and the worker say of paths, as the user this runs as: python -P as_nobody.py PLACE CASE."""

import json
import sys
from pathlib import Path

from eagle3_core.errors import BadInput
from server.services.paths import PathRules
from server.settings import Settings
from worker.run import claim

place, case = Path(sys.argv[1]), Path(sys.argv[2])
rules = PathRules(Settings(state=place / "state", roots=(case,)))
told = {
    "output": rules.unwritable(str(case / "out_ro" / "new"), {}),
    "existing output": rules.unwritable(str(case / "out_ro"), {}),
    "checkpoint": rules.unreadable(str(case / "locked" / "0"), []),
    "readable": rules.unreadable(str(case / "readable" / "0"), []),
}
try:
    claim(case / "out_ro" / "new", "job")
except BadInput as error:
    told["at start"] = str(error)
sys.stdout.write(json.dumps(told))
