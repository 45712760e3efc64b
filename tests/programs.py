"""What both frameworks' programs are held to."""

from benchmarks.matrix import results_of, served, watched


def assert_half_is_reused(program, llm, library, questions):
    """Of what is retrieved for the last question; and what the program says is the engine's own answer to the ids."""
    ask, engine = program.make(llm, library), llm.backend.engine
    for question in questions:
        with watched() as answers, library.finding() as found:
            said = ask(question)
        assert engine.finish_background(60)
    results = results_of(answers)
    assert served(engine, results, found.texts).share >= 0.5
    assert said.strip() in [result.text.strip() for result in results]
    for result in results:
        if not result.report.misses:
            assert engine.generate(result.prompt, max_new_tokens=8).token_ids == result.token_ids
