"""How a command fails: one line on standard error, a defined exit code, no traceback for a user's mistake.

Exit codes: 0 done, 1 the work failed, 2 the command or its configuration was misused, 130 interrupted.
"""

from __future__ import annotations


class CommandError(Exception):
    """A failure with one clear line. `exit_code` is 1 (failed) unless a subclass says otherwise."""

    exit_code = 1


class MisuseError(CommandError):
    """The user asked for something that cannot be: wrong path, wrong value, wrong combination."""

    exit_code = 2


class RunFailed(CommandError):
    """A run that started and could not finish; its run directory holds all that was acknowledged."""
