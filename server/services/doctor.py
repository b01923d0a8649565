"""`eyas doctor`: what on this host would cost a night, said beforehand. It changes nothing."""

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3_core.contract.jobdir import read_json
from eagle3_core.contract.locks import is_held
from server.db.backup import faults_of
from server.db.engine import Database
from server.db.migrate import condition
from server.errors import StartupError, Unavailable
from server.services.rebuild import unknown_jobs
from server.settings import Settings, unknown_variables
from server.system import host

Level = Literal["ok", "note", "warn", "fail"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written
LOW_BYTES = 20 << 30
SHARED_MEMORY_BYTES = 1 << 30
OPEN_FILES = 4096
DRIVER_LIMIT_S = 15.0
IMPORT_LIMIT_S = 120.0

_ASK_DRIVER = """
import json, pynvml
try:
    pynvml.nvmlInit()
except pynvml.NVMLError_LibraryNotFound:
    print("null")
else:
    names = [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    print(json.dumps({"driver": pynvml.nvmlSystemGetDriverVersion(), "gpus": names}))
"""
_ASK_WORKER = """
import json, importlib.util, worker.context, sys
found = {"python": sys.version.split()[0], "torch": None, "transformers": None, "gpus": 0}
if importlib.util.find_spec("torch"):
    import torch
    found |= {"torch": torch.__version__, "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}
if importlib.util.find_spec("transformers"):
    from importlib.metadata import version
    found["transformers"] = version("transformers")
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Check:
    """One finding: `fail` stops work, `warn` may cost some, `note` is worth knowing."""

    name: str
    level: Level
    text: str
    hint: str | None = None


def examine(settings: Settings) -> Iterator[Check]:
    """Every check, the quick ones first."""
    yield Check("host", "ok", f"{platform.node()}: {platform.system()} {platform.release()}, {os.cpu_count()} CPUs")
    yield from (Check("settings", "warn", text, "unset or correct it") for text in unknown_variables())
    yield _clock()
    yield _shared_memory()
    yield _open_files()
    yield _state(settings)
    yield from (_space(path) for path in settings.all_roots if path != settings.state or path.exists())
    yield from _database(settings)
    yield _daemon(settings)
    driver = host.ask([sys.executable, "-P", "-c", _ASK_DRIVER], DRIVER_LIMIT_S)
    yield _driver(driver)
    yield from _worker(settings, 0 if driver.value is None else len(driver.value["gpus"]))


def _clock() -> Check:
    kept = host.clock_is_kept()
    if kept is False:
        hint = "start chrony or systemd-timesyncd; durations are safe, times of day in answers are not"
        return Check("clock", "warn", "nobody keeps it right", hint)
    return Check("clock", "ok", "kept right" if kept else "the kernel does not say who keeps it")


def _shared_memory() -> Check:
    try:
        free, size = host.free_bytes(SHARED_MEMORY)
    except OSError as error:
        return Check(
            "shm", "warn", f"{SHARED_MEMORY}: {error.strerror}", "data loader processes need it; mount a tmpfs there"
        )
    text = f"{_size(free)} of {_size(size)} free"
    if free < SHARED_MEMORY_BYTES:
        hint = "in a container: --shm-size=8g or --ipc=host; else keep num_workers at 0"
        return Check("shm", "warn", text, hint)
    return Check("shm", "ok", text)


def _open_files() -> Check:
    soft, hard = host.open_files_limit()
    text = f"open files {soft}, at most {hard}"
    if soft < OPEN_FILES:
        return Check(
            "limits", "warn", text, f"ulimit -n {OPEN_FILES}, or LimitNOFILE= in the unit: each waiter needs one"
        )
    return Check("limits", "ok", text)


def _state(settings: Settings) -> Check:
    path = settings.state
    if not path.exists():
        return Check("state", "note", f"{path} does not exist yet", "`eyas serve` makes it")
    kind = host.file_system_of(path)
    if kind in host.NETWORK_FILE_SYSTEMS:
        hint = "SQLite and file locks need a local disk: put --state there; --root may stay on the network"
        return Check("state", "fail", f"{path} is on {kind}", hint)
    if not os.access(path, os.W_OK | os.X_OK):
        return Check("state", "fail", f"{path} (owner {path.stat().st_uid}) cannot be written by uid {os.geteuid()}")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return Check("state", "warn", f"{path} has mode {mode:04o}", f"it holds the token: chmod 700 {path}")
    return Check("state", "ok", f"{path}, mode {mode:04o}, on {kind}")


def _space(path: Path) -> Check:
    try:
        free, size = host.free_bytes(path)
    except OSError as error:
        return Check("disk", "warn", f"{path}: {error.strerror}", "make it, or leave it out of the roots")
    text = f"{path}: {_size(free)} of {_size(size)} free"
    if free < LOW_BYTES:
        return Check("disk", "warn", text, "a drafter's checkpoint with its optimizer state is about 10 GB; free some")
    return Check("disk", "ok", text)


def _database(settings: Settings) -> Iterator[Check]:
    path = settings.database
    if not path.exists():
        if settings.jobs_dir.is_dir() and any(settings.jobs_dir.iterdir()):
            hint = "`eyas rebuild` makes it from the job directories"
            yield Check("database", "fail", f"{path} does not exist", hint)
        else:
            yield Check("database", "note", f"{path} does not exist yet", "`eyas serve` makes it")
        return
    database = Database(path)
    try:
        faults = faults_of(path)
        if faults:
            hint = "stop the daemon, then `eyas rebuild` makes it anew from the job directories"
            yield Check("database", "fail", f"{path}: {'; '.join(faults[:3])}", hint)
            return
        behind = condition(database.engine)
        yield Check(
            "database", "ok" if behind is None else "note", f"{_size(path.stat().st_size)}, {behind or 'sound'}"
        )
        if behind is None and settings.jobs_dir.is_dir():
            yield from _unknown(*unknown_jobs(settings, database))
    except (Unavailable, StartupError) as error:
        yield Check("database", "fail", str(error), "see `eyas rebuild --help`, or put a backup back")
    finally:
        database.close()


def _unknown(unknown: list[str], any_known: bool) -> Iterator[Check]:
    if unknown:
        text = f"{len(unknown)} job directories are not in the database, such as {unknown[0]}"
        yield Check(
            "jobs", "warn" if any_known else "fail", text, "with the daemon stopped, `eyas rebuild` brings them in"
        )


def _daemon(settings: Settings) -> Check:
    if not is_held(settings.state / "daemon.lock"):
        return Check("daemon", "note", "not running")
    try:
        found: Any = read_json(settings.address_file)
        pid, url = int(found["pid"]), str(found["url"])
    except (ValueError, KeyError, TypeError):
        return Check("daemon", "note", "starting")
    service = host.service_of(pid)
    if service is None:
        return Check("daemon", "ok", f"{url}, pid {pid}, not a systemd service")
    mode = host.kill_mode(service)
    if mode not in ("process", "none"):
        hint = "set KillMode=process in the unit: else each restart of the daemon ends every job"
        return Check("daemon", "fail", f"{url} is {service} with KillMode={mode or 'unknown'}", hint)
    return Check("daemon", "ok", f"{url}, {service}, KillMode={mode}")


def _driver(answer: host.Answer) -> Check:
    if answer.trouble is not None:
        hint = "`nvidia-smi` and dmesg say more; after a driver upgrade the module must be loaded anew"
        return Check("driver", "fail", f"NVML: {answer.trouble}", hint)
    if answer.value is None:
        return Check("driver", "note", "no NVIDIA driver: jobs run on the CPU")
    names = answer.value["gpus"]
    return Check("driver", "ok", f"{answer.value['driver']}, {len(names)} GPUs: {', '.join(sorted(set(names)))}")


def _worker(settings: Settings, gpus: int) -> Iterator[Check]:
    python = settings.worker_python
    found, trouble = host.ask([str(python), "-P", "-c", _ASK_WORKER], IMPORT_LIMIT_S)
    if trouble is not None:
        yield Check(
            "worker", "fail", f"{python}: {trouble}", "install Eyas into that environment: pip install eyas[worker]"
        )
        return
    missing = [name for name in ("torch", "transformers") if found[name] is None]
    text = ", ".join(f"{name} {found[name] or 'missing'}" for name in ("python", "torch", "transformers"))
    if missing:
        yield Check("worker", "fail", f"{python}: {text}", f"pip install {' '.join(missing)} there")
        return
    yield Check("worker", "ok", f"{python}: {text}")
    if gpus and not found["gpus"]:
        hint = "its torch was built without CUDA, or for a newer driver"
        yield Check("cuda", "fail", f"the driver shows {gpus} GPUs, torch there sees none", hint)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
