"""Small file systems that can really be filled: tmpfs, which needs root."""

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

_CLONE_NEWNS = 0x20000


def own_mounts() -> None:
    """From here on what this process and those it starts mount ends with them, however they end.

    Without it a run that was killed leaves its file systems mounted, and no later one can remove their directories.
    Where this cannot be done nothing can be mounted either, which `cannot_mount` says.
    """
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0:
        # In a chroot "/" is no mount, and this fails: mounts are then seen, and left, outside.
        subprocess.run(["mount", "--make-rprivate", "/"], check=False, capture_output=True)


class SmallDisk:
    """A tmpfs that is mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def free(self) -> int:
        """Bytes."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Take all room there is, or all but so many bytes."""
        descriptor = os.open(self.path / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with contextlib.suppress(OSError):
                while (room := self.free - leave) > 0:
                    os.write(descriptor, bytes(min(room, 1 << 20)))
        finally:
            os.close(descriptor)

    def empty(self) -> None:
        """Give the room back."""
        (self.path / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it, whoever still uses it."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=False, capture_output=True)


def cannot_mount(path: Path, size: int) -> str | None:
    """Mount a tmpfs, or say why that cannot be done here."""
    if os.geteuid() != 0:
        return "a disk that can be filled is a tmpfs, and mounting one needs root"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", str(path)], capture_output=True, check=False
    )
    return None if done.returncode == 0 else f"no tmpfs can be mounted: {done.stderr.decode().strip()}"
