"""Where a user's own files go."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def home() -> Path:
    """This user's home; a folder of theirs under the temporary one where there is none (HOME is empty, say)."""
    if os.environ.get("HOME") != "":  # which `Path.home` takes for the root
        try:
            return Path.home()
        except RuntimeError:  # no HOME, and nobody of this id in the password file
            pass
    return Path(tempfile.gettempdir()) / f"raytune-eagle-{os.getuid()}"
