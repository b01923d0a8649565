"""A stop is heard at once, whatever the stage's main thread is doing; a helper's signals are none of the stage's."""

import subprocess
import sys

SCRIPT = """
import hashlib, os, signal, sys, threading
from worker.run import listen_for_stop
stop = threading.Event()
listen_for_stop(stop)
if sys.argv[1] == "child":
    seen, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready, b"x")
        while True:
            signal.pause()
    os.read(seen, 1)
    os.kill(pid, signal.SIGTERM)
    print("heard" if stop.wait(0.3) else "silent", flush=True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    sys.exit()
def tell():
    stop.wait()
    print("heard", flush=True)
    os._exit(0)
threading.Thread(target=tell, daemon=True).start()
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
hashlib.pbkdf2_hmac("sha256", b"x", b"x", 1 << 30)  # minutes without a line of Python
"""


def words(kind):
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT, kind], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_stop_is_heard_while_the_main_thread_runs_no_python():
    assert words("main") == ["heard"]


def test_a_signal_to_a_forked_helper_is_not_a_stop():
    assert words("child") == ["silent"]
