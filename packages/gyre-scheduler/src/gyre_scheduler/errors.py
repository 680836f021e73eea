"""The package's errors. Every message is one line that says what to do.

SchedulerError
├── SettingsError       a setting that cannot work, with the formula it breaks
├── ProtocolError       an event that cannot happen in the state the scheduler is in
├── ReplayDiverged      a recorded run and a fresh scheduler disagree
├── RunAborted          the scheduler gave the run up; the message is the reason
├── RunStalled          the runtime waited too long; the message names what it waited for
├── LostCell            raised by a Cells implementation when the cell died during an operation
├── CommandNotFound     a command does not exist or cannot be executed
│   ├── HarnessNotFound     ... the harness's; the settings must change
│   └── EvaluatorNotFound   ... the evaluator's, or its function cannot be loaded; only at the start of a run
├── TemplateError       a command or environment template names an unknown placeholder
├── TaskError           a task that cannot be laid out in a workspace
├── Unresolved          one attempt of an evaluation gave no score; never leaves `evaluation`
│   └── Unavailable         ... of a service, which may be asked again
└── WorkloadError       a simulated workload that cannot be drawn from
"""


class SchedulerError(Exception):
    """Base of everything this package raises on purpose."""


class SettingsError(SchedulerError):
    """A setting that cannot work; the message gives the formula it breaks."""


class ProtocolError(SchedulerError):
    """An event that cannot happen now: the environment and the scheduler disagree about the state."""


class ReplayDiverged(SchedulerError):
    """A recorded event gave other actions than the record says."""


class RunAborted(SchedulerError):
    """The scheduler emitted Abort; the message is its reason."""


class RunStalled(SchedulerError):
    """No event arrived for too long; the message names what the run waits for."""


class LostCell(SchedulerError):
    """A cell died during an operation. Raised by implementations of `runtime.Cells`, which also post CellLost."""

    def __init__(self, cell: int, reason: str):
        super().__init__(f"cell {cell} was lost: {reason}")
        self.cell = cell


class CommandNotFound(SchedulerError):
    """A command does not exist or cannot be executed."""


class HarnessNotFound(CommandNotFound):
    """The harness command does not exist or cannot be executed."""


class TemplateError(SchedulerError):
    """A command or environment template names a placeholder that does not exist."""


class TaskError(SchedulerError):
    """A task whose files cannot be laid out in a workspace."""


class EvaluatorNotFound(CommandNotFound):
    """The evaluator's module, function or command cannot be loaded."""


class Unresolved(SchedulerError):
    """One attempt of an evaluation gave no score; the message says why."""


class WorkloadError(SchedulerError):
    """A simulated workload without samples, or with parameters it cannot be drawn from."""
