"""The package's errors. Every message is one line that says what to do. No torch here.

TrainerError
├── SettingsError         a setting that cannot be had; nothing was started
├── RowError              a training row or micro-step that breaks its invariant
├── LedgerError           a micro-step handled twice, or by a cell that does not hold it
├── ModelError            a model folder that cannot be read, or an architecture that is not supported
├── GradientError         a loss or gradient that is not finite; the parameters are unchanged
├── VersionError          weights are not at the version they were promised to be
├── CollectiveError       a collective over a prefix of cells failed or passed its deadline
├── TransferError         weights could not be pulled; the destination is dirty
├── PeerRefused           the other end of a connection does not know the run's key
├── EngineError           the rollout engine refused, died, or did not get ready in time
│   ├── RequestError      a request that the engine will never take; nothing was changed
│   │   ├── MalformedRequest  no JSON object, or a field of a wrong type
│   │   └── ContractError     a sampling field that is unknown or of a wrong type
│   └── EngineReleased    the engine's memory is released: the request may go elsewhere, or come later
└── CellError             an operation of a cell failed; the cell lives on
    └── CellDied          the cell's process ended or stopped answering
"""


class TrainerError(Exception):
    """Base of everything this package raises on purpose."""


class SettingsError(TrainerError):
    """A setting that cannot be had. Nothing was started."""


class RowError(TrainerError):
    """A training row or micro-step that breaks its invariant."""


class LedgerError(TrainerError):
    """A micro-step handled twice, or by a cell that does not hold it."""


class ModelError(TrainerError):
    """A model folder that cannot be read, or an architecture that is not supported."""


class GradientError(TrainerError):
    """A loss or gradient that is not finite. The parameters are unchanged."""


class VersionError(TrainerError):
    """Weights are not at the version they were promised to be."""


class CollectiveError(TrainerError):
    """A collective over a prefix of cells failed or passed its deadline; own gradients are unchanged."""


class TransferError(TrainerError):
    """Weights could not be pulled. The destination is dirty until a later pull succeeds."""


class PeerRefused(TrainerError):
    """The peer does not know the run's key, or ended the connection during the handshake."""


class EngineError(TrainerError):
    """The rollout engine refused, died, or did not get ready in time."""


class RequestError(EngineError):
    """A request that cannot be served, now or later; nothing was changed."""


class MalformedRequest(RequestError):
    """A body that is no JSON object, or a field of a wrong type."""


class ContractError(RequestError):
    """A sampling field that is unknown or of a wrong type; SGLang tells these apart from MalformedRequest."""


class EngineReleased(EngineError):
    """The engine's memory is released. The request may go elsewhere, or come again later."""


class CellError(TrainerError):
    """An operation failed, the cell lives on. `kind` is the class name of the error inside the cell."""

    def __init__(self, cell: int, kind: str, message: str):
        super().__init__(f"cell {cell}: {message}")
        self.cell = cell
        self.kind = kind


class CellDied(CellError):
    """The cell's process ended or stopped answering; everything it held is lost."""

    def __init__(self, cell: int, reason: str):
        super().__init__(cell, "CellDied", reason)
