"""Arrays of integers in files, read slice by slice."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Integers(Protocol):
    """A one-dimensional array of integers, in memory or in a file, that is read slice by slice."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray[np.integer]: ...


class FileArray:
    """A one-dimensional array in a file, of which only what is asked for is read.

    Read, not mapped: the pages of a mapped file that were touched once count as this process's
    memory until the machine runs short of it, so that a process would seem to grow with its data.
    """

    def __init__(self, path: Path, dtype: Any, *, length: int, offset: int = 0) -> None:
        """``length`` elements from the byte ``offset``. Raises OSError."""
        self._path = path
        self.dtype = np.dtype(dtype)
        self._length = length
        self._offset = offset
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def __reduce__(self) -> Any:
        return _reopen, (self._path, self.dtype, self._length, self._offset)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice, /) -> NDArray[np.integer]:
        start, stop, step = part.indices(self._length)
        if step != 1:
            raise IndexError("only slices of consecutive elements can be read")
        values = np.empty(max(0, stop - start), dtype=self.dtype)
        view = values.view(np.uint8)
        at = self._offset + start * self.dtype.itemsize
        done = 0
        while done < len(view):  # one call reads 2 GB at most
            num_read = os.preadv(self._descriptor, [view[done:].data], at + done)
            if not num_read:
                raise OSError(f"{self._path} was cut short while it was in use")
            done += num_read
        return values


def _reopen(path: Path, dtype: Any, length: int, offset: int) -> FileArray:
    return FileArray(path, dtype, length=length, offset=offset)
