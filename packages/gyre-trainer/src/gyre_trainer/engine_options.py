"""The options of an engine server, checked before anything is started."""

from typing import Any

import torch

from gyre_trainer.errors import SettingsError
from gyre_trainer.settings import LARGEST, MOST_RUNNING, MOST_THREADS, check_number

RANGES = {
    "port": (0, 65535),
    "max_running": (1, MOST_RUNNING),
    "context_length": (2, LARGEST),
    "threads": (1, MOST_THREADS),
    "seed": (0, 2**63 - 1),
}


def check_options(options: dict[str, Any]) -> None:
    """Raise SettingsError for the first option that is out of its range, or a device that cannot compute here.

    One that is missing or None is left to its default.
    """
    for name, (least, most) in RANGES.items():
        if options.get(name) is not None:
            check_number(name, options[name], least, most, whole=True)
    host = options.get("host", "")
    try:
        host.encode("idna")
    except UnicodeError:
        raise SettingsError(f"host {host!r:.60} is not the name of a host") from None
    device = options.get("device")
    if device is not None:
        try:
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises each of them
            reason = str(error).partition("\n")[0]
            raise SettingsError(f"device {device!r} cannot be used: {reason}") from None
