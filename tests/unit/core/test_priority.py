"""Work that gives way to a training."""

import json
import subprocess
import sys

CODE = """
import json, os, threading
from eagle3_core.contract.priority import {name}

def look(): return [os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)]

seen = []
worker = threading.Thread(target=lambda: ({name}(), seen.append(look())))
worker.start(); worker.join()
print(json.dumps([seen[0], look()]))
"""


def told(name: str) -> list[list[int]]:
    """Niceness and policy of a thread that called the function, and of the process's first thread."""
    done = subprocess.run([sys.executable, "-c", CODE.format(name=name)], capture_output=True, text=True, check=True)
    found: list[list[int]] = json.loads(done.stdout)
    return found


def test_a_thread_goes_behind_all_others_and_leaves_the_rest_of_its_process_alone() -> None:
    normal, idle = 0, 5  # SCHED_OTHER, SCHED_IDLE
    assert told("be_nice") == [[19, normal], [0, normal]]
    assert told("step_back") == [[19, idle], [0, normal]]
