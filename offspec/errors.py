"""Every error that offspec raises on purpose. The ground floor: it imports nothing.

    OffspecError                  the message is one line: what, where, the remedy
    ├── UsageError                an invalid argument or combination
    ├── CheckpointError           a checkpoint is missing, damaged, or in a form that is not read
    │   └── MissingWeightsError   its weights, or some of them, are not there at all
    ├── UnsupportedModelError     the architecture, or a feature of it, is not implemented
    ├── TokenizerError            the tokenizer or chat template is missing, damaged, or refuses the input
    ├── VocabularyMismatchError   draft and target do not speak the same tokens
    ├── ContextLengthError        the prompt does not fit the model's context
    ├── MemoryLimitError          what has to be in memory does not fit into what may be used
    ├── HardwareError             a device or a disk of this machine does not answer
    ├── StorageError              a file cannot be written: no space, no permission
    ├── NumericalError            the model computed something that is not a number
    └── VerificationError         speculative text was not what plain decoding gives

Foreign exceptions are mapped to these once, at the boundary where they arise, with `from exc`.
"""


class OffspecError(Exception):
    """Base of all errors meant for a person; `exit_code` is what the CLI leaves with."""

    exit_code = 1


class UsageError(OffspecError):
    """An invalid argument or combination of arguments."""

    exit_code = 2


class CheckpointError(OffspecError):
    """A checkpoint is missing, damaged, or in a form that is not read."""


class MissingWeightsError(CheckpointError):
    """A checkpoint's weights, or some of them, are not there at all; what is there may be sound."""


class UnsupportedModelError(OffspecError):
    """The architecture, or a feature of it, is not implemented."""


class TokenizerError(OffspecError):
    """The tokenizer or chat template is missing, damaged, or refuses the input."""


class VocabularyMismatchError(OffspecError):
    """Draft and target do not speak the same tokens."""


class ContextLengthError(OffspecError):
    """The prompt does not fit the model's context."""


class MemoryLimitError(OffspecError):
    """What has to be in memory does not fit into what may be used."""


class HardwareError(OffspecError):
    """A device or a disk of this machine does not answer."""


class StorageError(OffspecError):
    """A file cannot be written: no space, no permission."""


class NumericalError(OffspecError):
    """The model computed something that is not a number."""


class VerificationError(OffspecError):
    """Speculative text was not what plain decoding gives."""
