"""Developers' measurements; not in the wheel, and never imported by the product, except for `measuring`.

`measuring` is what `ragblend bench` and `ragblend tune` need: it is installed, and imported, as `ragblend.measuring`.
Run a script from the repository's root: `python -m benchmarks.measure_decode --help`. The figures of a page in `docs/`
marked * are recorded in a JSON file here, from which the page is rendered; other figures are what the script prints.

| script                 | measures                                                            | shown in            |
|------------------------|---------------------------------------------------------------------|---------------------|
| measure_speed          | each phase of a prefill beside the machine's limits; long prompts   | performance.md *    |
| measure_decode         | decoding per token, and of several answers at once                  | performance.md      |
| measure_ingest         | encoding passages beside the model's own forward                    | performance.md      |
| measure_start          | a new process of `ragblend ask`, to its first token                 | performance.md      |
| shift_variants         | `probe-shift` with parts changed, beside it                         | results.md *        |
| measure_gpu            | first tokens, loading and kernels on a GPU                          | performance.md      |
| measure_readers        | words read from documents, beside `independent_parsers`             | performance.md      |
| measure_peers          | RAGBlend beside transformers, llama.cpp and vLLM                    | results.md *        |
| measure_frameworks     | LlamaIndex's and LangChain's examples, beside their own LLM         | results.md *        |
| measure_programs       | what the frameworks' own programs (`programs_*`) reuse              | programs.md *       |
| measure_schemas        | JSON schemas that answers keep to                                   | frameworks.md       |
| measure_search         | languages, questions about other things, follow-up questions        | quality.md          |
| measure_answers        | right answers about files as a person has them (`newcomer/`)        | quality.md          |
| measure_citations      | citations beside labels by hand                                     | quality.md          |
| measure_load           | first tokens by request rate                                        | load.md *           |
| measure_server         | what the server's times reveal; many streams for minutes            | server.md           |
| measure_vllm           | the connector: times, equal answers, what times reveal              | vllm.md             |
| generate_questions     | nothing: makes questions for `ragblend bench quality --data`        | quality.md          |
| results                | nothing: records runs of `ragblend bench` and of the scripts above  | results.md, README  |
| method_pictures        | the rows that each method computes, as pictures                     | methods.md          |
| needle_picture         | nothing: draws one fact by depth and length                         | methods.md          |
| readme_pictures        | nothing: takes the README's pictures                                | README              |

`common` has what they share, `filler` invented text, `reused_tokens` counts where a prompt's tokens came from. OpenMP
is set up as in `ragblend`, before torch is imported.
"""

import ragblend.engine  # noqa: F401
