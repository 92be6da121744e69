"""Files that may hold secrets, such as the environment of a rank: no other user can ever read them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def open_new(path: Path) -> BinaryIO:
    """Open an empty file for unbuffered writing, made by this call unless there is one. Raises OSError.

    One that is there keeps its rights and owner: put it out of the way first, unless it is a device.
    """
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE), "wb", buffering=0
    )


def write(path: Path, text: str) -> None:
    """Write a new file in place of any that is there. Raises OSError."""
    path.unlink(missing_ok=True)
    with open_new(path) as file:
        file.write(text.encode())
