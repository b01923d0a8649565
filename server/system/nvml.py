"""The GPUs of this host, read through NVML. Runs in the collector's process only: any call may hang for ever.

    unready --init--> ready --reading--> ready
       ^                |  driver reloaded or gone, a GPU lost: shut down, begin anew
       +----------------+

A field that cannot be read is null, and `reasons` says why. Nothing is keyed by index, which may change whenever the
driver is loaded anew.

Source: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/
"""

import os
import pwd
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from eagle3_core.contract import proctree

_DRIVER_TROUBLE = frozenset(
    {pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
)
_NO_DRIVER = frozenset({pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
LOST_AGAIN_S = 30.0
"""A lost GPU comes back only to a new beginning; that is tried so often."""

VERSIONS_DIFFER = "library and loaded driver are of different versions; load the new driver, or reboot"

PCI = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"

THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}

Fields = dict[str, Any]


class NvmlReader:
    """Reads all GPUs, again and again, over whatever happens to the driver."""

    def __init__(self) -> None:
        self._ready = False
        self._driver: str | None = None
        self._begin_again_at: float | None = None
        self._seen: dict[int, tuple[str, str | None]] = {}
        self._users: dict[int, str] = {}

    def read(self) -> Fields:
        """One reading: {"driver", "gpus", "error", "absent", "stale_library"}.

        `error` says why nothing could be read; `absent` that this is so because the host has no NVIDIA GPU;
        `stale_library` that only a new process can load the library that fits the driver.
        """
        if self._begin_again_at is not None and time.monotonic() >= self._begin_again_at:
            self._end()
        try:
            if not self._ready:
                self._begin()
            gpus = self._gpus()
        except pynvml.NVMLError as error:
            self._end()
            absent = error.value in _NO_DRIVER and not _has_nvidia_hardware()
            stale = error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
            text = VERSIONS_DIFFER if stale else str(error)
            return {"driver": None, "gpus": [], "error": text, "absent": absent, "stale_library": stale}
        return {"driver": self._driver, "gpus": gpus, "error": None, "absent": False, "stale_library": False}

    def _begin(self) -> None:
        pynvml.nvmlInit()
        self._ready, self._begin_again_at = True, None
        self._driver = pynvml.nvmlSystemGetDriverVersion()

    def _end(self) -> None:
        self._begin_again_at = None
        if self._ready:
            self._ready = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                return  # it was not initialised any more

    def _gpus(self) -> list[Fields]:
        gpus: list[Fields] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpus += self._gpu_and_instances(index)
        present = {gpu["uuid"] for gpu in gpus}
        for gpu in gpus:
            known = self._seen.get(gpu["index"])
            if gpu["uuid"] is None and known is not None and known[0] not in present:
                gpu["uuid"], gpu["name"] = known
        for gpu in gpus:
            if gpu["uuid"] is not None and gpu["instance"] is None:
                self._seen[gpu["index"]] = (gpu["uuid"], gpu["name"])
        return gpus

    def _gpu_and_instances(self, index: int) -> list[Fields]:
        gpu = _empty(index)
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            self._heed(error)
            gpu["lost"] = str(error)
            gpu["reasons"] = dict.fromkeys((*_FIELDS, "uuid", "name"), str(error))
            return [gpu]
        self._fill(gpu, handle)
        try:
            gpu["mig"] = pynvml.nvmlDeviceGetMigMode(handle)[0] == 1
        except pynvml.NVMLError as error:
            self._heed(error)  # a GPU that has no such mode does not have it switched on
        return [gpu, *(self._instances(gpu, handle) if gpu["mig"] else [])]

    def _instances(self, gpu: Fields, parent: Any) -> list[Fields]:
        found: list[Fields] = []
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, number)
            except pynvml.NVMLError as error:
                self._heed(error)
                continue  # no instance has this number
            instance = _empty(gpu["index"])
            instance["instance"], instance["parent"] = number, gpu["uuid"]
            self._fill(instance, handle)
            found.append(instance)
        return found

    def _fill(self, gpu: Fields, handle: Any) -> None:
        self._field(gpu, "uuid", partial(pynvml.nvmlDeviceGetUUID, handle))
        self._field(gpu, "name", partial(pynvml.nvmlDeviceGetName, handle))
        for name, reader in _READERS.items():
            self._field(gpu, name, partial(reader, handle))
        memory = gpu.pop("memory")
        for name in ("total", "used", "free"):
            gpu[f"memory_{name}"] = None if memory is None else int(getattr(memory, name))
            if memory is None:
                gpu["reasons"][f"memory_{name}"] = gpu["reasons"]["memory"]
        gpu["reasons"].pop("memory", None)
        if gpu["processes"] is not None:
            gpu["processes"] = [self._process(*one) for one in gpu["processes"]]

    def _field(self, gpu: Fields, name: str, read: Callable[[], Any]) -> None:
        try:
            gpu[name] = read()
        except pynvml.NVMLError as error:
            self._heed(error)
            gpu[name] = None
            gpu["reasons"][name] = str(error)
            if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                gpu["lost"] = str(error)

    def _heed(self, error: pynvml.NVMLError) -> None:
        """Trouble of the driver ends the reading; a lost GPU only has it begun anew after a while."""
        if error.value in _DRIVER_TROUBLE:
            raise error
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST and self._begin_again_at is None:
            self._begin_again_at = time.monotonic() + LOST_AGAIN_S

    def _process(self, kind: str, pid: int, memory: int | None) -> Fields:
        try:
            uid = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116 - one call
        except OSError:
            return {"pid": pid, "kind": kind, "memory": memory, "user": None, "foreign_user": None, "job": None}
        return {
            "pid": pid,
            "kind": kind,
            "memory": memory,
            "user": self._user(uid),
            "foreign_user": uid != os.geteuid(),
            "job": proctree.job_of(pid),
        }

    def _user(self, uid: int) -> str:
        if uid not in self._users:
            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid)
        return self._users[uid]


def _empty(index: int) -> Fields:
    fields: Fields = dict.fromkeys((*_FIELDS, "uuid", "name", "parent"))
    return {"index": index, "instance": None, "mig": False, "lost": None, "reasons": {}, **fields}


def _memory(handle: Any) -> Any:
    """Version 2 does not count what the driver keeps for itself as used; drivers before 510 do not have it."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _ecc_errors(handle: Any) -> int:
    """Uncorrected ones since the driver was loaded."""
    return int(
        pynvml.nvmlDeviceGetTotalEccErrors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    )


def _throttle_reasons(handle: Any) -> list[str]:
    bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


def _processes(handle: Any) -> list[tuple[str, int, int | None]]:
    found = [("compute", one) for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    try:
        found += [("graphics", one) for one in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)]
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
    return [(kind, int(one.pid), one.usedGpuMemory) for kind, one in found]


_READERS: dict[str, Callable[[Any], Any]] = {
    "utilization_percent": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    "memory": _memory,
    "power_w": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    "power_limit_w": lambda handle: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
    "temperature_c": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
    "ecc_errors": _ecc_errors,
    "throttle_reasons": _throttle_reasons,
    "processes": _processes,
}


_FIELDS = (*(name for name in _READERS if name != "memory"), "memory_total", "memory_used", "memory_free")


def _has_nvidia_hardware() -> bool:
    """Whether the PCI bus has an NVIDIA display or compute device, driver or not."""
    try:
        return any(
            (device / "vendor").read_text().strip() == NVIDIA_VENDOR
            and (device / "class").read_text().startswith(DISPLAY_CLASS)
            for device in PCI.iterdir()
        )
    except OSError:
        return False
