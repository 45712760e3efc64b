"""Where the numbers were taken: without this, a table of times says nothing."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.extras import check_installed

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine


EXTRA = ("jinja2", "matplotlib", "rouge_score", "scipy")


def check_extra() -> None:
    """Raise UsageError if a package of the extra `bench` is missing: now, and not after an hour of measuring."""
    check_installed("The benches", EXTRA, "bench")


def environment(engine: "Engine") -> dict[str, Any]:
    """Model, device, processor and versions, as plain JSON values."""
    import torch

    device = engine.device
    return {
        "model": engine.model_name,
        "dtype": engine.dtype,
        "device": device,
        "gpu": torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else None,
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "ragblend": _version("ragblend"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model name; what the platform module knows where there is no /proc."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
