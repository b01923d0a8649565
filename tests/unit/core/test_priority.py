"""Work that gives way to a training."""

import os
import threading

from eagle3_core.contract.priority import be_nice


def test_a_thread_goes_behind_all_others_and_leaves_the_rest_of_its_process_alone() -> None:
    seen = []

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def work() -> None:
        be_nice()
        seen.append(niceness())
        started = threading.Thread(target=lambda: seen.append(niceness()))
        started.start()
        started.join()

    before = niceness()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert (seen, niceness()) == ([19, 19], before)
