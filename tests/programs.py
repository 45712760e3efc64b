"""What both frameworks' programs are held to."""

from collections import Counter

from benchmarks.reused_tokens import count_served, record_answers, results_of


def assert_half_is_reused(program, llm, library, questions):
    """Of what is retrieved for the last question; and what the program says is the engine's own answer to the ids."""
    ask, engine = program.make(llm, library), llm.backend.engine
    for question in questions:
        with record_answers() as answers, library.finding() as found:
            said = ask(question)
        assert engine.finish_background(60)
    results = results_of(answers)
    assert count_served(engine, results, found.texts).share >= 0.5
    assert said.strip() in [result.text.strip() for result in results]
    for result in results:
        if not result.report.misses:
            assert engine.generate(result.prompt, max_new_tokens=8).token_ids == result.token_ids


def assert_all_is_reused(engine, answers, texts, **options):
    """Each of the texts is in the prompts of these answers, as a passage with KV wherever it is in one.

    And the answers are the engine's own to the same token ids. Returns the results.
    """
    results = results_of(answers)
    for result in results:
        prompt = "".join(segment.text for segment in result.prompt.segments)
        there = Counter({text: prompt.count(text) for text in texts})
        assert Counter(chunk.text for chunk in result.prompt.chunks) == +there
        assert (result.report.hits, result.report.misses) == (there.total(), 0)
        assert engine.generate(result.prompt, **options).token_ids == result.token_ids
    assert {chunk.text for result in results for chunk in result.prompt.chunks} == set(texts)
    return results
