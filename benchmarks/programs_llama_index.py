"""Programs from LlamaIndex's documentation, with the same calls in the same order.

Each names the repository and file that it follows. Only the model, the embedder and the documents are ours.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llama_index.core import (
    Document,
    DocumentSummaryIndex,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
    get_response_synthesizer,
)
from llama_index.core.agent.react.output_parser import ReActOutputParser
from llama_index.core.agent.react.types import ActionReasoningStep, ResponseReasoningStep
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.base_retriever import dispatcher
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.evaluation import FaithfulnessEvaluator, RelevancyEvaluator
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent
from llama_index.core.llms.llm import LLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.output_parsers.base import StructuredOutput
from llama_index.core.output_parsers.selection import Answer
from llama_index.core.postprocessor import LLMRerank, MetadataReplacementPostProcessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import (
    CitationQueryEngine,
    CustomQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.response_synthesizers import BaseSynthesizer, CompactAndRefine
from llama_index.core.retrievers import AutoMergingRetriever, BaseRetriever
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step

from benchmarks.reused_tokens import Ask, Program


class LlamaIndexRetrieved(BaseEventHandler):
    """Records retrieved texts, and what postprocessors made of them, without metadata."""

    _texts: list[str] = PrivateAttr(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "LlamaIndexRetrieved"

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, RetrievalEndEvent):
            self.keep(event.nodes)
        if isinstance(event, SynthesizeEndEvent):
            self.keep(getattr(event.response, "source_nodes", ()))

    def keep(self, nodes: Sequence[NodeWithScore]) -> None:
        self._texts += [node.node.get_content(MetadataMode.NONE) for node in nodes]

    @property
    def texts(self) -> list[str]:
        return self._texts


@dataclass
class LlamaIndexDocuments:
    """Documents, their embedder, and how they are split; sizes in tokens as LlamaIndex counts them."""

    documents: Sequence[Document]
    embedder: BaseEmbedding
    chunk: int = 1024
    overlap: int = 200

    @property
    def splitter(self) -> SentenceSplitter:
        return SentenceSplitter(chunk_size=self.chunk, chunk_overlap=self.overlap)

    @contextmanager
    def finding(self) -> Iterator[LlamaIndexRetrieved]:
        """Record what is retrieved within the block."""
        found, handlers = LlamaIndexRetrieved(), dispatcher.root.event_handlers
        handlers.append(found)
        try:
            yield found
        finally:
            handlers.remove(found)

    def index(self) -> VectorStoreIndex:
        return VectorStoreIndex.from_documents(
            list(self.documents), embed_model=self.embedder, transformations=[self.splitter]
        )


def engine_asker(engine: Any) -> Ask:
    return lambda question: str(engine.query(question))


def as_starter(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    return engine_asker(library.index().as_query_engine(llm=llm))


def as_citations(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    engine = CitationQueryEngine.from_args(
        library.index(),
        llm=llm,
        similarity_top_k=3,
        citation_chunk_size=library.chunk // 2,
        citation_chunk_overlap=min(20, library.overlap),
    )
    return engine_asker(engine)


def as_sentence_windows(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    parser = SentenceWindowNodeParser.from_defaults(
        window_size=3, window_metadata_key="window", original_text_metadata_key="original_text"
    )
    nodes = parser.get_nodes_from_documents(list(library.documents))
    engine = VectorStoreIndex(nodes, embed_model=library.embedder).as_query_engine(
        llm=llm, similarity_top_k=2, node_postprocessors=[MetadataReplacementPostProcessor("window")]
    )
    return engine_asker(engine)


def as_auto_merging(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    sizes = [2 * library.chunk, library.chunk // 2, library.chunk // 8]
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=sizes, chunk_overlap=0)
    nodes = parser.get_nodes_from_documents(list(library.documents))
    context = StorageContext.from_defaults()
    context.docstore.add_documents(nodes)
    index = VectorStoreIndex(get_leaf_nodes(nodes), storage_context=context, embed_model=library.embedder)
    base: Any = index.as_retriever(similarity_top_k=6)
    retriever = AutoMergingRetriever(base, context)
    return engine_asker(RetrieverQueryEngine.from_args(retriever, llm=llm))


def as_chat(mode: Any) -> Callable[[LLM, LlamaIndexDocuments], Ask]:
    def make(llm: LLM, library: LlamaIndexDocuments) -> Ask:
        memory = ChatMemoryBuffer.from_defaults(token_limit=1500)
        engine: Any = library.index().as_chat_engine(chat_mode=mode, llm=llm, memory=memory)
        return lambda question: str(engine.chat(question))

    return make


QA = PromptTemplate(
    "What was found:\n\n{context_str}\n\nAnswer from it, and from nothing that you know besides.\nQuery: {query_str}\n"
    "Answer: "
)


class Synthesizing(CustomQueryEngine):
    retriever: BaseRetriever
    response_synthesizer: BaseSynthesizer

    def custom_query(self, query_str: str) -> Any:
        return self.response_synthesizer.synthesize(query_str, self.retriever.retrieve(query_str))


class Completing(CustomQueryEngine):
    retriever: BaseRetriever
    llm: Any

    def custom_query(self, query_str: str) -> str:
        nodes = self.retriever.retrieve(query_str)
        context = "\n\n".join(node.node.get_content() for node in nodes)
        return str(self.llm.complete(QA.format(context_str=context, query_str=query_str)))


def as_custom_with_synthesizer(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    synthesizer = get_response_synthesizer(llm=llm, response_mode="compact")  # type: ignore[arg-type]
    return engine_asker(
        Synthesizing(retriever=library.index().as_retriever(), response_synthesizer=synthesizer)
    )


def as_custom_with_completion(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    return engine_asker(Completing(retriever=library.index().as_retriever(), llm=llm))


class Retrieved(Event):
    nodes: list[NodeWithScore]


class Reranked(Event):
    nodes: list[NodeWithScore]


def all_in_order(answer: str, num_choices: int) -> tuple[list[int], list[float]]:
    """Ignore the model's ranking and keep everything in order: a small model does not follow the format."""
    return list(range(1, num_choices + 1)), [1.0] * num_choices


def as_workflow(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    class AnswerWorkflow(Workflow):
        @step
        async def retrieve(self, ctx: Context, event: StartEvent) -> Retrieved:
            await ctx.store.set("query", event.get("query"))
            return Retrieved(
                nodes=await event.get("index").as_retriever(similarity_top_k=2).aretrieve(event.query)
            )

        @step
        async def rerank(self, ctx: Context, event: Retrieved) -> Reranked:
            ranker = LLMRerank(
                choice_batch_size=5, top_n=3, llm=llm, parse_choice_select_answer_fn=all_in_order
            )
            query = await ctx.store.get("query", default=None)
            return Reranked(nodes=ranker.postprocess_nodes(event.nodes, query_str=query))

        @step
        async def synthesize(self, ctx: Context, event: Reranked) -> StopEvent:
            summarizer = CompactAndRefine(llm=llm, streaming=True)
            query = await ctx.store.get("query", default=None)
            return StopEvent(result=await summarizer.asynthesize(query, nodes=event.nodes))

    index = library.index()

    async def asked(question: str) -> str:
        response: Any = await AnswerWorkflow(timeout=600).run(query=question, index=index)
        return "".join([piece async for piece in response.async_response_gen()])

    return lambda question: asyncio.run(asked(question))


def as_document_summary(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    synthesizer = get_response_synthesizer(llm=llm, response_mode="tree_summarize", use_async=True)  # type: ignore[arg-type]
    index = DocumentSummaryIndex.from_documents(
        list(library.documents),
        llm=llm,
        transformations=[library.splitter],
        response_synthesizer=synthesizer,
        embed_model=library.embedder,
    )
    return engine_asker(index.as_query_engine(llm=llm, response_mode="tree_summarize", use_async=True))


def as_evaluated(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    engine = library.index().as_query_engine(llm=llm)
    faithful, relevant = FaithfulnessEvaluator(llm=llm), RelevancyEvaluator(llm=llm)

    def ask(question: str) -> str:
        response: Any = engine.query(question)
        faithful.evaluate_response(response=response)
        relevant.evaluate_response(query=question, response=response)
        return str(response)

    return ask


class ScriptedOutput(ReActOutputParser):
    """Replaces a small model's output by `script`, as a larger model would write it in the requested format."""

    def __init__(self, script: Callable[[str], Any]) -> None:
        self.script = script

    def parse(self, output: str, is_streaming: bool = False) -> Any:
        return self.script(output)

    def format(self, query: str) -> str:
        return query


def as_router(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    nodes = library.splitter.get_nodes_from_documents(list(library.documents))
    summaries, passages = SummaryIndex(nodes[:2]), VectorStoreIndex(nodes, embed_model=library.embedder)
    tools = [
        QueryEngineTool.from_defaults(
            summaries.as_query_engine(llm=llm, response_mode="tree_summarize", use_async=True),
            description="Useful for a summary of the archive",
        ),
        QueryEngineTool.from_defaults(
            passages.as_query_engine(llm=llm), description="Useful for single questions about the archive"
        ),
    ]
    second = StructuredOutput(raw_output="", parsed_output=[Answer(choice=2, reason="It is one question.")])
    selector = LLMSingleSelector.from_defaults(llm=llm, output_parser=ScriptedOutput(lambda _: second))
    return engine_asker(RouterQueryEngine(selector=selector, query_engine_tools=tools, llm=llm))


def as_sub_questions(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    asked: list[str] = []

    def generated(_: str) -> StructuredOutput:
        questions = [SubQuestion(sub_question=asked[-1], tool_name="archive")]
        return StructuredOutput(raw_output="", parsed_output=questions)

    tool = QueryEngineTool(
        query_engine=library.index().as_query_engine(llm=llm),
        metadata=ToolMetadata(name="archive", description="The archive of the tramway"),
    )
    generator = LLMQuestionGenerator.from_defaults(llm=llm, output_parser=ScriptedOutput(generated))
    engine = SubQuestionQueryEngine.from_defaults(
        [tool], llm=llm, question_gen=generator, use_async=True, verbose=False
    )

    def ask(question: str) -> str:
        asked.append(question)
        return str(engine.query(question))

    return ask


def as_react_agent(llm: LLM, library: LlamaIndexDocuments) -> Ask:
    steps: list[ActionReasoningStep] = []
    tool = QueryEngineTool(
        query_engine=library.index().as_query_engine(llm=llm, similarity_top_k=3),
        metadata=ToolMetadata(name="archive", description="Answers a plain question about the tramway"),
    )
    parser = ScriptedOutput(
        lambda said: steps.pop() if steps else ResponseReasoningStep(thought="", response=said)
    )
    agent = ReActAgent(tools=[tool], llm=llm, output_parser=parser, streaming=False)

    async def asked(question: str) -> str:
        steps[:] = [
            ActionReasoningStep(thought="I look.", action="archive", action_input={"input": question})
        ]
        return str(await agent.run(question, ctx=Context(agent)))

    return lambda question: asyncio.run(asked(question))


EXAMPLES = "run-llama/llama_index, docs/examples"
PROGRAMS = [
    Program("starter", "run-llama/llama_index, docs/docs/getting_started/starter_example.md", as_starter),
    Program("citations", f"{EXAMPLES}/query_engine/citation_query_engine.ipynb", as_citations),
    Program(
        "sentence windows",
        f"{EXAMPLES}/node_postprocessor/MetadataReplacementDemo.ipynb",
        as_sentence_windows,
    ),
    Program("auto-merging", f"{EXAMPLES}/retrievers/auto_merging_retriever.ipynb", as_auto_merging),
    Program("chat engine, context", f"{EXAMPLES}/chat_engine/chat_engine_context.ipynb", as_chat("context")),
    Program(
        "chat engine, condense plus context",
        f"{EXAMPLES}/chat_engine/chat_engine_condense_plus_context.ipynb",
        as_chat("condense_plus_context"),
    ),
    Program(
        "chat engine, condense question",
        f"{EXAMPLES}/chat_engine/chat_engine_condense_question.ipynb",
        as_chat("condense_question"),
    ),
    Program(
        "custom query engine, synthesizer",
        f"{EXAMPLES}/query_engine/custom_query_engine.ipynb",
        as_custom_with_synthesizer,
    ),
    Program(
        "custom query engine, completion",
        f"{EXAMPLES}/query_engine/custom_query_engine.ipynb",
        as_custom_with_completion,
    ),
    Program("router", f"{EXAMPLES}/query_engine/RouterQueryEngine.ipynb", as_router),
    Program("sub-questions", f"{EXAMPLES}/query_engine/sub_question_query_engine.ipynb", as_sub_questions),
    Program("ReAct agent", f"{EXAMPLES}/agent/react_agent_with_query_engine.ipynb", as_react_agent),
    Program("workflow with reranking", f"{EXAMPLES}/workflow/rag.ipynb", as_workflow),
    Program(
        "document summaries", f"{EXAMPLES}/index_structs/doc_summary/DocSummary.ipynb", as_document_summary
    ),
    Program("faithfulness and relevancy", f"{EXAMPLES}/evaluation/faithfulness_eval.ipynb", as_evaluated),
]
