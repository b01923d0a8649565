"""`make chaos`: the long form. The last line is one JSON object; exit status 1 when anything was lost or doubled."""

import argparse
import json
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.daemon import libfaketime
from tests.chaos.run import run
from tests.disks import own_mounts

parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
parser.add_argument("--rounds", type=int, default=200)
parser.add_argument("--seed", type=int, default=None, help="of the mishaps; default: a new one, which is printed")
parser.add_argument("--keep", type=Path, default=None, help="directory for state and logs; default: a temporary one")
arguments = parser.parse_args()

place = arguments.keep or Path(tempfile.mkdtemp(prefix="eyas-chaos-"))
place.mkdir(parents=True, exist_ok=True)
seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
print(f"{arguments.rounds} rounds, seed {seed}, in {place}", flush=True)
if libfaketime() is None:
    print("no clock jumps: libfaketime is not installed (Debian: apt-get install faketime)", flush=True)
if os.geteuid() != 0:
    print("no full disks: mounting a small one needs root", flush=True)
if shutil.which("cc") is None:
    print("no failing NVML: there is no C compiler to make the library of the fake GPUs", flush=True)
own_mounts()
figures, faults = run(place, arguments.rounds, seed)
for line in faults:
    print(line)
if faults:
    print(f"state and logs are kept in {place}")
print(json.dumps(figures))
sys.exit(1 if faults else 0)
