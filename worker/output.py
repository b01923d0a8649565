"""Standard output and error that outlast a full disk: what cannot be written is counted, and no reason to end."""

import io
import os
import sys
from typing import TYPE_CHECKING

from eagle3_core.contract.jobdir import is_full

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def outlast_a_full_disk() -> None:
    """Put such writers in the place of sys.stdout and sys.stderr."""
    sys.stdout = io.TextIOWrapper(_Outlasting(1), encoding="utf-8", errors="backslashreplace", write_through=True)
    sys.stderr = io.TextIOWrapper(_Outlasting(2), encoding="utf-8", errors="backslashreplace", write_through=True)


class _Outlasting(io.RawIOBase):
    """A descriptor to write to, never closed here."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lost = 0

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write all of it, or count what a full disk did not take."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            if self._lost:
                os.write(self._descriptor, b"[%d bytes of output were lost: the disk was full]\n" % self._lost)
                self._lost = 0
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            if not is_full(error):
                raise
            self._lost += len(left)
        return size
