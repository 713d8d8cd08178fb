"""All exceptions that offspec raises on purpose. This module imports nothing.

    OffspecError                  the message is one line: what, where, the remedy
    ├── UsageError                an argument or a combination is invalid
    ├── CheckpointError           a checkpoint is missing, damaged, or in an unsupported form
    │   └── MissingWeightsError   some or all of its weights are missing
    ├── UnsupportedModelError     the architecture, or a feature of it, is not implemented
    ├── TokenizerError            the tokenizer or chat template is missing, damaged, or refuses the input
    ├── VocabularyMismatchError   draft and target have too few tokens in common
    ├── ContextLengthError        the prompt does not fit the context
    ├── MemoryLimitError          the model does not fit the memory that may be used
    ├── HardwareError             a device or disk of this machine does not respond
    ├── StorageError              a file cannot be written: no space, no permission
    ├── NumericalError            the model computed a value that is not a number
    ├── ConstraintError           a grammar or schema allows no further token, or is too complex to follow
    └── VerificationError         speculative text differs from plain decoding's

Exceptions of other libraries become one of these, with `from exc`, where they arise.
"""


class OffspecError(Exception):
    """Base of all errors that are meant for the user. `exit_code` is the CLI's exit code."""

    exit_code = 1


class UsageError(OffspecError):
    """An argument or a combination of arguments is invalid."""

    exit_code = 2


class CheckpointError(OffspecError):
    """A checkpoint is missing, damaged, or in an unsupported form."""


class MissingWeightsError(CheckpointError):
    """Some or all of a checkpoint's weights are missing; the other files may be valid."""


class UnsupportedModelError(OffspecError):
    """The architecture, or a feature of it, is not implemented."""


class TokenizerError(OffspecError):
    """The tokenizer or chat template is missing, damaged, or refuses the input."""


class VocabularyMismatchError(OffspecError):
    """Draft and target have too few tokens in common."""


class ContextLengthError(OffspecError):
    """The prompt does not fit the context."""


class MemoryLimitError(OffspecError):
    """The model does not fit the memory that may be used."""


class HardwareError(OffspecError):
    """A device or disk of this machine does not respond."""


class StorageError(OffspecError):
    """A file cannot be written: no space, no permission."""


class NumericalError(OffspecError):
    """The model computed a value that is not a number."""


class ConstraintError(OffspecError):
    """A grammar or schema allows no further token, or is too complex to follow."""


class VerificationError(OffspecError):
    """Speculative text differs from plain decoding's."""
