"""How the tests run: side by side, a file in one process; Hypothesis without time limits on shared machines.

In CI Hypothesis tries the same examples every time, elsewhere new ones.
"""

import os

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

settings.register_profile("explore", deadline=None)
settings.register_profile("repeat", deadline=None, derandomize=True)
settings.load_profile("repeat" if os.environ.get("CI") else "explore")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Tests wait more than they compute; each process takes a gigabyte or two."""
    return min(len(os.sched_getaffinity(0)) + 1, 8)


TOGETHER = "tests/conformance/"
"""Its files share engines, and one of them takes long to start."""


class _Files(LoadFileScheduling):
    """Gives out whole files, those that share what is dear as one."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return _Files(config, log)
