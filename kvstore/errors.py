"""Every error that RAGBlend raises on purpose.

RagBlendError
├── UsageError                wrong argument, setting or policy: the caller can fix the call (exit code 2)
│   └── SettingsError         an unknown or impossible setting
├── Cancelled                 the caller asked for the work to stop
├── StoreError                the KV store cannot do what was asked
│   ├── StoreFullError        the disk (or the byte budget) has no room for one value
│   ├── StoreLockedError      another process is writing to this home
│   ├── StoreFormatError      the store was made by another format version
│   └── CorruptBlobError      a stored value is damaged; it has been put in quarantine
├── ModelError                the model cannot be loaded
│   ├── ModelNotFoundError    nothing there, or the default model is not installed
│   ├── TokenizerMissingError a model folder without a tokenizer
│   ├── CorruptModelError     a damaged GGUF or safetensors file
│   └── UnsupportedModelError the model cannot be fused (it is still served by full prefill)
├── PromptError               a prompt that cannot be run
│   ├── PromptTooLongError    longer than the model's window
│   └── UnknownChunkError     a node id that was never encoded here
├── DocumentError             one file cannot be ingested; the others go on
│   ├── DocumentNotFoundError no such path
│   ├── UnreadableDocumentError  permissions, damage, or content that its suffix does not promise
│   ├── EncryptedDocumentError   a password is needed
│   ├── EmptyDocumentError       no text in it (an empty file, a scanned PDF)
│   └── OversizedDocumentError   too large, or an archive that unpacks to too much
└── LibraryError              the registry of documents cannot do what was asked
"""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that nobody knows; empty where nothing is near it."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class RagBlendError(Exception):
    """Root of all errors raised on purpose; the message says what, where and what to do."""


class UsageError(RagBlendError, ValueError):
    """The caller passed something that cannot be used."""


class SettingsError(UsageError):
    """A setting is unknown or impossible."""


class Cancelled(RagBlendError):
    """The caller asked for the work to stop, and it stopped."""


class StoreError(RagBlendError):
    """The KV store cannot do what was asked."""


class StoreFullError(StoreError):
    """There is no room for one value."""


class StoreLockedError(StoreError):
    """Another process is writing; the message names it."""


class StoreFormatError(StoreError):
    """The store was made by another format version."""


class CorruptBlobError(StoreError):
    """A stored value is damaged; it is in quarantine and counts as a miss."""


class ModelError(RagBlendError):
    """The model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """There is no model at that place."""


class DownloadStoppedError(ModelError):
    """The user stopped a model's download."""


class TokenizerMissingError(ModelError):
    """The model has no tokenizer."""


class CorruptModelError(ModelError):
    """A model file is damaged."""


class UnsupportedModelError(ModelError):
    """Fusing would be wrong for this model."""


class PromptError(RagBlendError):
    """The prompt cannot be run."""


class PromptTooLongError(PromptError):
    """The prompt is longer than the model's window."""


class UnknownChunkError(PromptError):
    """A node id that nothing was encoded for."""


class DocumentError(RagBlendError):
    """One document cannot be ingested."""


class DocumentNotFoundError(DocumentError):
    """There is nothing at that path."""


class UnreadableDocumentError(DocumentError):
    """The document cannot be read as what it says it is."""


class EncryptedDocumentError(DocumentError):
    """The document needs a password."""


class EmptyDocumentError(DocumentError):
    """There is no text in the document."""


class OversizedDocumentError(DocumentError):
    """The document, or what it unpacks to, is too large."""


class DamagedDocumentError(DocumentError):
    """What was kept of the document is not what was written."""


class LibraryError(RagBlendError):
    """The registry of documents cannot do what was asked."""
