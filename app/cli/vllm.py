"""`ragblend vllm check`: whether a model's prompts are fused in vLLM."""

import typer

from ragblend.app.cli.common import Cli, command

vllm = typer.Typer(name="vllm", help="Check that vLLM fuses prompts.", no_args_is_help=True)


@command(vllm)
def check(cli: Cli) -> int:
    """Run the connector's self-test in the vLLM that is installed here, or ask a running server (--vllm URL).

    Exit code 1 if nothing would be fused, or no server answers; 2 if no supported vLLM is installed here.
    """
    from ragblend.engine.engine import require_local_engine
    from ragblend.integrations.vllm.gate import refusal_of

    with cli.open() as workspace:
        engine, url = workspace.engine, workspace.settings.vllm
        if url is None:
            folder = require_local_engine(engine, "the self-test").runtime.folder
            refusal = refusal_of(str(folder), workspace.home.root, cli.dtype)
        else:
            refusal = engine.gate.reason
        model = workspace.settings.model
    where = url or "vLLM here"
    text = f"{where} fuses prompts of {model}" if refusal is None else f"{where} fuses nothing: {refusal}"
    cli.result({"model": model, "where": where, "fuses": refusal is None, "refusal": refusal}, text)
    return int(refusal is not None)
