"""Files that are whole or not there, also with several processes in one folder."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes `content`, making the folder and replacing what was there.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        # A lone surrogate in a name must not be what fails.
        name.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
