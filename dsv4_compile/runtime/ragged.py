"""Buffers for lists of different lengths, at addresses that a CUDA graph can hold.

    indices  [7 2 9 | 4 | 1 8 | 0 0 0 0 ...]     capacity entries, the tail is `fill`
    indptr   [0 3 4 6   6 6 6 ...]               rows + 1 entries, the tail repeats the last: rows without entries

What sparse attention reads changes its length with every step, and a graph that was recorded for one length would read
that many entries for ever. These buffers have one length: of the largest batch. Kernels find the real one in `indptr`.
"""

from __future__ import annotations

import torch

__all__ = ["CapacityError", "RaggedBuffers"]

_STAGES = 4
"""Updates from the host that may be on their way at the same time."""


class CapacityError(ValueError):
    """More rows or entries than the buffers were made for."""


class RaggedBuffers:
    """Ragged rows of integers: row `i` is `indices[indptr[i]:indptr[i + 1]]`.

    Args:
        rows: most rows of an update.
        capacity: most entries of an update, all rows together.
        device: where the buffers are.
        dtype: of the entries and of `indptr`, int32 or int64.
        fill: what entries behind the last are, so that a kernel that reads too far still finds a valid index.

    Attributes:
        indices: `[capacity]`, an input of compiled functions; its address never changes.
        indptr: `[rows + 1]`, likewise.

    Raises:
        ValueError: a size below one, or another dtype.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.int32,
        fill: int = 0,
    ):
        if rows < 1 or capacity < 1:
            raise ValueError(
                f"RaggedBuffers need at least one row and one entry, and {rows} and {capacity} were given."
            )
        if dtype not in (torch.int32, torch.int64):
            raise ValueError(f"RaggedBuffers hold int32 or int64, and not {dtype}.")
        self.rows, self.capacity, self.fill = rows, capacity, fill
        self.indices = torch.full((capacity,), fill, dtype=dtype, device=device)
        self.indptr = torch.zeros(rows + 1, dtype=dtype, device=device)
        for buffer in (self.indices, self.indptr):
            torch._dynamo.mark_static_address(buffer)
        self._stages = [_Stage(self) for _ in range(_STAGES)] if self.indices.is_cuda else []
        self._turn = 0

    def update(self, indices: torch.Tensor, indptr: torch.Tensor) -> None:
        """Replaces the content, in the order of the current stream and without waiting for the device.

        Tensors on the host go through pinned memory; the host waits only when four updates are on their way already.

        Args:
            indices: `[total]` entries of all rows.
            indptr: `[n + 1]` where each row begins, 0 first and `total` last; n at most `rows`.

        Raises:
            CapacityError: too many rows or entries; the buffers are as before.
            TypeError: no tensor.
            ValueError: another number of axes or another dtype, or on the host an `indptr` that does not fit or numbers
                too large for the dtype of the buffers. What is on the device is not looked at.
        """
        self._check(indices, indptr)
        with torch.cuda.device_of(self.indices):
            stage = None
            if self._stages and not (indices.is_cuda and indptr.is_cuda):
                stage, self._turn = self._stages[self._turn], (self._turn + 1) % _STAGES
                indices, indptr = stage.through(indices, indptr)
            total, starts = indices.shape[0], indptr.shape[0]
            self.indices[:total].copy_(indices, non_blocking=True)
            self.indices[total:].fill_(self.fill)
            self.indptr[:starts].copy_(indptr, non_blocking=True)
            self.indptr[starts:].copy_(self.indptr[starts - 1].expand(self.rows + 1 - starts))
            if stage is not None:
                stage.sent()

    def _holds(self, tensor: torch.Tensor) -> bool:
        limits = torch.iinfo(self.indices.dtype)
        return not tensor.numel() or (int(tensor.min()) >= limits.min and int(tensor.max()) <= limits.max)

    def _check(self, indices: torch.Tensor, indptr: torch.Tensor) -> None:
        for name, tensor in (("indices", indices), ("indptr", indptr)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a tensor, and it is a {type(tensor).__name__}.")
            if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{name} must be one row of int32 or int64, and it is {tensor.dtype}{list(tensor.shape)}."
                )
            if tensor.device.type == "cpu" and not self._holds(tensor):
                raise ValueError(
                    f"{name} has numbers that {self.indices.dtype} does not hold; give the buffers dtype=torch.int64."
                )
        total, rows = indices.shape[0], indptr.shape[0] - 1
        if rows < 0:
            raise ValueError("indptr must have an entry more than there are rows, and it is empty.")
        if rows > self.rows:
            raise CapacityError(f"These buffers hold {self.rows} rows, and {rows} were given.")
        if total > self.capacity:
            raise CapacityError(f"These buffers hold {self.capacity} entries, and {total} were given.")
        if indptr.device.type == "cpu" and not _fits(indptr, total):
            raise ValueError(f"indptr must go up from 0 to the number of entries, {total}, and it does not.")


def _fits(indptr: torch.Tensor, total: int) -> bool:
    return int(indptr[0]) == 0 and int(indptr[-1]) == total and bool((indptr[1:] >= indptr[:-1]).all())


class _Stage:
    """Pinned memory for one update, and when it may be written again."""

    def __init__(self, buffers: RaggedBuffers):
        self.indices = torch.empty(buffers.capacity, dtype=buffers.indices.dtype, pin_memory=True)
        self.indptr = torch.empty(buffers.rows + 1, dtype=buffers.indptr.dtype, pin_memory=True)
        self.event = torch.cuda.Event()

    def through(self, indices: torch.Tensor, indptr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those on the host, copied here."""
        self.event.synchronize()
        staged = []
        for tensor, room in ((indices, self.indices), (indptr, self.indptr)):
            if tensor.device.type == "cpu":
                tensor = room[: tensor.shape[0]].copy_(tensor)
            staged.append(tensor)
        return staged[0], staged[1]

    def sent(self) -> None:
        """The copies from here are on the current stream."""
        self.event.record()
