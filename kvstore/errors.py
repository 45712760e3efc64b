"""All errors that RAGBlend raises on purpose; a message says what failed, where, and what to do.

RagBlendError
├── UsageError                wrong argument, setting or policy: the caller can fix the call (exit code 2)
│   └── SettingsError         an unknown or impossible setting
├── Cancelled                 the caller cancelled the work
├── StoreError                an operation of the KV store failed
│   ├── StoreFullError        no room for one value: the disk is full, or it exceeds the byte budget
│   ├── StoreLockedError      another process is writing to this home
│   ├── StoreFormatError      the store was made by another format version
│   ├── CorruptBlobError      a stored value is damaged and was quarantined
│   └── RemoteError           the shared store does not answer in time
├── ModelError                the model cannot be loaded
│   ├── ModelNotFoundError    it does not exist, or the default model is not installed
│   ├── DownloadStoppedError  the user stopped a model's download
│   ├── TokenizerMissingError a model folder without a tokenizer
│   ├── CorruptModelError     a damaged GGUF or safetensors file
│   ├── ModelServerError      the model's server does not answer, refuses, or stopped within an answer
│   └── UnsupportedModelError the model cannot be fused (full prefill serves it), or a reranker has several scores
├── DeviceError               the GPU is missing, has no free memory, or failed
├── PromptError               a prompt that cannot be run
│   ├── PromptTooLongError    longer than the model's window
│   └── UnknownChunkError     a node id that was never encoded here
├── DocumentError             one file cannot be ingested; the others continue
│   ├── DocumentNotFoundError no such path
│   ├── UnreadableDocumentError  permissions, damage, or content that does not match its suffix
│   ├── EncryptedDocumentError   a password is needed
│   ├── EmptyDocumentError       no text in it (an empty file, a scanned PDF)
│   └── OversizedDocumentError   too large, or an archive that unpacks to too much
└── LibraryError              an operation of the registry of documents failed
"""

import difflib
import json
import shlex
from collections.abc import Iterable
from typing import TypeVar
from urllib.parse import urlsplit

Error = TypeVar("Error", bound=BaseException)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suffix for messages about an unknown name: the most similar known one, if any."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def install_hint(extra: str = "") -> str:
    """The command that installs an extra from where RAGBlend was installed, because it is on no package index."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import, and only for messages
    from urllib.request import url2pathname

    try:
        source = json.loads(distribution("ragblend").read_text("direct_url.json") or "{}").get("url", "")
    except (PackageNotFoundError, ValueError):
        source = ""
    # Not installed from a local file or folder: assume that the user's working directory is the checkout.
    place = url2pathname(urlsplit(source).path) if source.startswith("file:") else "."
    return f"pip install {shlex.quote(place + (f'[{extra}]' if extra else ''))}"


class RagBlendError(Exception): ...


def without_traceback(error: Error) -> Error:
    """Prepare an error for another thread, and return it.

    If it or one of its causes is one of ours, their tracebacks are removed: the message is enough, and the frames would
    keep a request's data alive, in a reference cycle even until the next garbage collection.
    """
    chain: list[BaseException] = [error]
    for link in chain:
        chain += [
            cause for cause in (link.__cause__, link.__context__) if cause is not None and cause not in chain
        ]
    if any(isinstance(link, RagBlendError) for link in chain):
        for link in chain:
            link.__traceback__ = None
    return error


class UsageError(RagBlendError, ValueError): ...


class SettingsError(UsageError): ...


class Cancelled(RagBlendError): ...


class StoreError(RagBlendError): ...


class StoreFullError(StoreError): ...


class StoreLockedError(StoreError): ...


class StoreFormatError(StoreError): ...


class CorruptBlobError(StoreError): ...


class RemoteError(StoreError): ...


class ModelError(RagBlendError): ...


class ModelNotFoundError(ModelError): ...


class DownloadStoppedError(ModelError): ...


class TokenizerMissingError(ModelError): ...


class CorruptModelError(ModelError): ...


class ModelServerError(ModelError): ...


class UnsupportedModelError(ModelError): ...


class DeviceError(RagBlendError): ...


class PromptError(RagBlendError): ...


class PromptTooLongError(PromptError): ...


class UnknownChunkError(PromptError): ...


class DocumentError(RagBlendError): ...


class DocumentNotFoundError(DocumentError): ...


class UnreadableDocumentError(DocumentError): ...


class EncryptedDocumentError(DocumentError): ...


class EmptyDocumentError(DocumentError): ...


class OversizedDocumentError(DocumentError): ...


class LibraryError(RagBlendError): ...
