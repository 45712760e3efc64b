"""What Gradio keeps of an upload goes as soon as the library has its own copy: a deleted document must be nowhere."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path


def discard(paths: Sequence[Path]) -> None:
    """Remove uploaded files, each with the folder that Gradio made for it; what lies elsewhere is left alone."""
    root = Path(os.environ["GRADIO_TEMP_DIR"]).resolve()
    for path in paths:
        folder = path.resolve().parent
        if folder != root and folder.is_relative_to(root):
            shutil.rmtree(folder, ignore_errors=True)
