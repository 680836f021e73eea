"""Hypothesis: no time limits on shared machines; in CI the same examples every time, elsewhere new ones."""

import os

from hypothesis import settings

settings.register_profile("explore", deadline=None)
settings.register_profile("repeat", deadline=None, derandomize=True)
settings.load_profile("repeat" if os.environ.get("CI") else "explore")
