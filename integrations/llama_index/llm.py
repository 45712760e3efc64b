"""RAGBlendLLM: an ordinary LlamaIndex LLM whose prefill reuses the KV of the passages that it finds in its prompts.

Every method goes the same way: what was asked becomes a `Request` (how to make the prompt, and with which options), the
backend runs it, and a responder puts the answer in LlamaIndex's own words.
"""

import asyncio
import difflib
import json
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, aclosing, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    LogProb,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools.types import BaseTool

from ragblend.engine.prompts.segments import Literal, Prompt
from ragblend.integrations.backend import Turn, kv_statistics, logprobs, marks, parts_of, usage
from ragblend.integrations.calls import OTHER_NAMES, Call
from ragblend.integrations.llama_index.errors import in_llama_index_words
from ragblend.integrations.llama_index.learning import LEARNERS
from ragblend.integrations.llama_index.messages import (
    FilledMessages,
    FilledText,
    arguments_of,
    text_of,
    turns_of,
    with_text,
)
from ragblend.integrations.llama_index.nodes import (
    FORM,
    Nodes,
    further_passages_of,
    named_passages,
    passages_of,
)
from ragblend.integrations.llama_index.prediction import StructuredPrediction
from ragblend.integrations.llama_index.streams import astops_when_closed, begun, stops_when_closed
from ragblend.integrations.parameters import PER_CALL, Parameters
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:  # torch comes with it
    from ragblend.engine.prompts.tools import ParsedAnswer
    from ragblend.engine.results import Result

Response = TypeVar("Response", ChatResponse, CompletionResponse)
Raw = dict[str, Any]
# (the text so far, what is new in it, and at the end all that is known)
Respond = Callable[[str, str | None, "Known | None"], Response]


@dataclass(frozen=True)
class Known:
    """What is told of a whole answer beside its text."""

    raw: Raw
    said: "ParsedAnswer"
    logprobs: list[list[LogProb]] | None


@dataclass(frozen=True)
class Request:
    """One call: how its prompt is made (in a worker thread, where the call is async) and what it is run with."""

    make_prompt: Callable[[], Prompt]
    call: Call
    from_template: bool

    def errors(self) -> AbstractContextManager[None]:
        return in_llama_index_words(self.from_template)


class RAGBlendLLM(StructuredPrediction, Parameters, FunctionCallingLLM):
    """A local LLM that reuses the stored KV of the passages in its prompts; any prompt works, with or without them.

    Responses carry `raw = {"usage": ..., "kv": ...}` (in streams, the last one). Further keyword arguments of every
    method: max_new_tokens (or max_tokens), temperature, top_p, top_k, repetition_penalty, stop, seed, method, ratio,
    and `passages=` or `nodes=`, which name what stands in the prompt without registering it.

    Example:
        `index.as_query_engine(llm=RAGBlendLLM())`
    """

    other_names = {"model_name": "model"} | OTHER_NAMES
    learners = LEARNERS

    max_new_tokens: int = Field(default=256, gt=0)
    """The most tokens of an answer."""
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More options of decoding."""
    context_window: int | None = Field(default=None, gt=0)
    """Tokens; None for the model's own window."""
    is_chat_model: bool | None = None
    """None: whether the tokenizer has a chat template."""
    _last_stats: Raw | None = PrivateAttr(default=None)

    @classmethod
    def _with_unknown(cls, told: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
        """Raise UsageError with the nearest name that there is."""
        name, *_ = unknown
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(cls.model_fields))}"
        raise UsageError(f"{cls.__name__} has no parameter {name!r}; {hint}")

    @field_validator("generate_kwargs")
    @classmethod
    def _check_generate_kwargs(cls, options: dict[str, Any]) -> dict[str, Any]:
        return cls._checked_options(options)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> "RAGBlendLLM":
        """LlamaIndex copies components at will, callbacks and all."""
        return self.model_copy()

    @classmethod
    def class_name(cls) -> str:
        return "RAGBlendLLM"

    # --- what it is

    @property
    def metadata(self) -> LLMMetadata:
        """What the model is. Reads its config and tokenizer, never its weights, and only what was not given."""
        return LLMMetadata(
            context_window=self.context_window or self.backend.engine.context_window,
            num_output=self.max_new_tokens,
            is_chat_model=self._chats,
            is_function_calling_model=self._chats and self._own_prompt is None and self.backend.calls_tools,
            model_name=self.model,
        )

    @property
    def _chats(self) -> bool:
        if self.is_chat_model is not None:
            return self.is_chat_model
        return self.backend.engine.tokenizer.chat_template is not None

    @property
    def _own_prompt(self) -> Callable[[Sequence[ChatMessage]], str] | None:
        """The user's `messages_to_prompt`; None: messages are put in the model's chat template."""
        given = self.messages_to_prompt
        return None if given is generic_messages_to_prompt else given

    @property
    def last_stats(self) -> Raw | None:
        """`raw` of the request that finished last on this object, in whichever thread; None before the first.

        Where several run at once, read each response's own `raw`, or listen to `LLMChatEndEvent`.
        """
        return self._last_stats

    def to_payload(self) -> dict[str, Any]:
        """For events. Said without the metadata, which may load a tokenizer in the event loop; no paths of yours."""
        fields = {name: getattr(self, name) for name in ("collection", *PER_CALL)}
        return {"class_name": self.class_name(), "model_name": self.model} | fields

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text by the model's own tokenizer: what LlamaIndex's packers and splitters want to count."""
        segment = Literal(text, verbatim=True)
        return list(self.backend.engine.tokenize(Prompt([segment])).segment_ids[-1])

    @property
    def template_tokens(self) -> int:
        """Tokens that the chat template adds to a system and a user message, which LlamaIndex does not count."""
        empty = self.backend.chat_prompt([Turn("system", ("",)), Turn("user", ("",))])
        return len(self.backend.engine.tokenize(empty).token_ids)

    def remember(self, nodes: Nodes, encode: bool = False) -> None:
        """Register nodes, so that their texts are found in prompts, with their metadata or without.

        encode: store their KV (with their metadata) now, rather than on use.
        """
        nodes = list(nodes)
        self.backend.remember(further_passages_of(nodes))
        self.backend.remember(passages_of(nodes), encode=encode)

    def forget(self, node_ids: list[str]) -> int:
        """Forget nodes that were deleted: their registration and the KV that no other node shares."""
        forms = (form for node_id in node_ids for form in self.backend.registry.named(node_id + FORM))
        return self.backend.forget([*node_ids, *forms])

    # --- chat

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._answer(self._chat_request(messages, kwargs), _chat_response)

    @stops_when_closed
    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._stream(self._chat_request(messages, kwargs), _chat_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self._aanswer(self._chat_request(messages, kwargs), _chat_response)

    @astops_when_closed
    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return await self._astream(self._chat_request(messages, kwargs), _chat_response)

    # --- tools

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `chat` takes. tool_choice: as OpenAI's interface has it; `tool_required` is another word for `any`."""
        said = ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg
        chosen = tool_choice if tool_choice is not None else "any" if tool_required else None
        messages = [*(chat_history or []), *([] if said is None else [said])]
        if isinstance(chat_history, FilledMessages):
            messages = FilledMessages(messages, chat_history.passages)
        return {
            "messages": messages,
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": chosen,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in an answer. Raises UsageError for an answer without, where one has to be."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            cut = (response.raw or {}).get("finish_reason") == "length"
            why = "it reached max_new_tokens: allow more" if cut else repr(response.message.content)[:200]
            raise UsageError(f"the answer calls no tool: {why}")
        return [
            ToolSelection(tool_id=b.tool_call_id or "", tool_name=b.tool_name, tool_kwargs=arguments_of(b))
            for b in calls
        ]

    # --- completion

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._answer(self._text_request(prompt, formatted, kwargs), _completion)

    @stops_when_closed
    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return self._stream(self._text_request(prompt, formatted, kwargs), _completion)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return await self._aanswer(self._text_request(prompt, formatted, kwargs), _completion)

    @astops_when_closed
    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        return await self._astream(self._text_request(prompt, formatted, kwargs), _completion)

    # --- prompts

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        """LlamaIndex's own, which a synthesizer may tell the passages (`passages=`, `nodes=`) beside the variables."""
        passages = _taken(prompt, prompt_args)
        return FilledMessages(super()._get_messages(prompt, **prompt_args), passages)

    def _extend_messages(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Programs fill their templates themselves, and then ask for this."""
        return FilledMessages(super()._extend_messages(messages), ())

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """The same; and which of it are the template's own words."""
        passages = _taken(prompt, prompt_args)
        texts = {
            name: value for name, value in (prompt.kwargs | prompt_args).items() if isinstance(value, str)
        }
        marked = prompt_args | dict(zip(texts, marks(len(texts)), strict=True))
        parts = parts_of(super()._get_prompt(prompt, **marked), list(texts.values()))
        return FilledText.of(super()._get_prompt(prompt, **prompt_args), passages, parts)

    def _chat_request(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Request:
        passages = messages.passages if isinstance(messages, FilledMessages) else None
        with in_llama_index_words(passages is not None):
            call = self._named_call(kwargs, passages)
            make_prompt = partial(self._chat_prompt, call, messages, turns_of(messages))
        return Request(make_prompt, call, from_template=passages is not None)

    def _chat_prompt(self, call: Call, messages: Sequence[ChatMessage], turns: list[Turn]) -> Prompt:
        """In the words of the user's `messages_to_prompt` if there is one, else of the model's chat template."""
        written = self._own_prompt
        if written is None:
            return call.chat_prompt(turns)
        if call.wanted.tools:
            raise UsageError(
                "messages_to_prompt writes the prompt, and would not show the model the tools that it may call; leave "
                "it out, or the tools"
            )
        texts = [text_of(message) for message in messages]
        marked = written(list(map(with_text, messages, marks(len(texts)))))
        return call.text_prompt(written(messages), parts_of(marked, texts))

    def _text_request(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> Request:
        passages = prompt.passages if isinstance(prompt, FilledText) else None
        call = self._named_call(kwargs, passages)
        make_prompt = partial(self._text_prompt, call, prompt, formatted)
        return Request(make_prompt, call, from_template=passages is not None)

    def _text_prompt(self, call: Call, text: str, formatted: bool) -> Prompt:
        """As it stands if it is formatted; else the user's `completion_to_prompt`, or a message to a chat model."""
        if formatted:
            return call.text_prompt(text, text.parts if isinstance(text, FilledText) else ())
        given = self.completion_to_prompt
        own = None if given is default_completion_to_prompt else given
        if own is not None or not self._chats:
            put = own or self._extend_prompt
            [mark] = marks(1)
            return call.text_prompt(put(text), parts_of(put(mark), [text]))
        return call.chat_prompt(turns_of(self._extend_messages([ChatMessage(text)])))

    def _named_call(self, kwargs: dict[str, Any], passages: Any) -> Call:
        given = dict(kwargs)
        named = named_passages(given.pop("passages", passages), given.pop("nodes", None))
        return self._call(named, self.generate_kwargs, given)

    # --- running them

    def _answer(self, request: Request, respond: Respond[Response]) -> Response:
        with request.errors():
            result = request.call.generate(request.make_prompt())
        return self._whole(result, request, respond, None)

    async def _aanswer(self, request: Request, respond: Respond[Response]) -> Response:
        with request.errors():
            prompt = await asyncio.to_thread(request.make_prompt)
            result = await request.call.agenerate(prompt)
        return self._whole(result, request, respond, None)

    def _stream(self, request: Request, respond: Respond[Response]) -> Generator[Response, None, None]:
        """The device begins at once; wrong arguments raise here."""
        with request.errors():
            items = request.call.stream(request.make_prompt())
        return begun(self._pieces(items, request, respond))

    def _pieces(
        self, items: "Generator[str | Result, None, None]", request: Request, respond: Respond[Response]
    ) -> Generator[Response, None, None]:
        """Closing it, or dropping it, stops the device."""
        text = ""
        with request.errors(), closing(items):
            for item in items:
                if not isinstance(item, str):
                    result = item
                    continue
                text += item
                yield respond(text, item, None)
        yield self._whole(result, request, respond, "")

    async def _astream(self, request: Request, respond: Respond[Response]) -> AsyncGenerator[Response, None]:
        with request.errors():
            prompt = await asyncio.to_thread(request.make_prompt)
        return begun(self._apieces(prompt, request, respond))

    async def _apieces(
        self, prompt: Prompt, request: Request, respond: Respond[Response]
    ) -> AsyncGenerator[Response, None]:
        text, result = "", None
        with request.errors():
            async with aclosing(request.call.astream(prompt)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, str):
                        text += piece
                        yield respond(text, piece, None)
                    else:
                        result = piece
        assert result is not None, "the result is the last item of a stream that ends"
        yield self._whole(result, request, respond, "")

    def _whole(
        self, result: "Result", request: Request, respond: Respond[Response], delta: str | None
    ) -> Response:
        raw: Raw = {"usage": usage(result.report), "kv": kv_statistics(result)}
        raw["finish_reason"] = "stop" if result.stopped else "length"
        self._last_stats = raw
        said = request.call.said(result)
        likely = logprobs(result, self.backend.engine.tokenizer)
        told = None if likely is None else [_log_probs(token) for token in likely]
        return respond(said.text, delta, Known(raw, said, told))


def _taken(prompt: BasePromptTemplate, prompt_args: dict[str, Any]) -> tuple[Passage, ...]:
    """The passages named among a template's arguments, taken out of them; a variable of that name stays one."""
    named = {
        name: prompt_args.pop(name, None)
        for name in ("passages", "nodes")
        if name not in prompt.template_vars
    }
    return named_passages(named.get("passages"), named.get("nodes"))


def _chat_response(text: str, delta: str | None, known: Known | None) -> ChatResponse:
    if known is None:
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)
    calls = [
        ToolCallBlock(tool_call_id=c.id, tool_name=c.name, tool_kwargs=c.arguments) for c in known.said.calls
    ]
    words = [TextBlock(text=text)] if text or not calls else []
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[*words, *calls])
    if calls:  # where LlamaIndex's streamed programs look whether there are any
        message.additional_kwargs["tool_calls"] = [_openai_call(call) for call in calls]
    if known.said.broken is not None:
        broken = {"name": known.said.broken_name, "arguments": known.said.broken}
        message.additional_kwargs["invalid_tool_calls"] = [broken]
    return ChatResponse(message=message, delta=delta, raw=known.raw, logprobs=known.logprobs)


def _openai_call(call: ToolCallBlock) -> dict[str, Any]:
    function = {"name": call.tool_name, "arguments": json.dumps(call.tool_kwargs, ensure_ascii=False)}
    return {"id": call.tool_call_id, "type": "function", "function": function}


def _completion(text: str, delta: str | None, known: Known | None) -> CompletionResponse:
    if known is None:
        return CompletionResponse(text=text, delta=delta)
    return CompletionResponse(text=text, delta=delta, raw=known.raw, logprobs=known.logprobs)


def _log_probs(token: dict[str, Any]) -> list[LogProb]:
    """The most likely tokens where they were asked for, else the one that was said, as LlamaIndex's OpenAI has it."""
    return [
        LogProb(token=each["token"], logprob=each["logprob"], bytes=each["bytes"] or [])
        for each in token["top_logprobs"] or [token]
    ]
