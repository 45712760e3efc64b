"""RAGBlendLLM: a LlamaIndex LLM whose prefill reuses the KV of the passages that it finds in its prompts.

Every method works alike: the request becomes a `PreparedCall` (a function that makes the prompt, and the options), the
backend runs it, and a `Respond` function turns the answer into LlamaIndex's response.
"""

import json
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing
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
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools.types import BaseTool

from ragblend.engine.prompts.segments import Prompt
from ragblend.integrations.backend import (
    ChatTurn,
    kv_statistics,
    logprobs,
    placeholders,
    split_at_placeholders,
    usage,
)
from ragblend.integrations.calls import ALIASES, Call, PreparedCall
from ragblend.integrations.llama_index.errors import llama_index_errors
from ragblend.integrations.llama_index.listener import LIVE_MODELS
from ragblend.integrations.llama_index.messages import (
    FilledMessages,
    FilledText,
    arguments_of,
    text_of,
    turns_of,
)
from ragblend.integrations.llama_index.nodes import (
    ALTERNATIVE_MARK,
    Nodes,
    alternative_passages_of,
    named_passages,
    passages_of,
)
from ragblend.integrations.llama_index.prediction import StructuredPrediction
from ragblend.integrations.llama_index.streams import closing_with
from ragblend.integrations.parameters import PER_CALL, ModelParameters
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import UsageError, did_you_mean

if TYPE_CHECKING:  # imports torch
    from ragblend.engine.prompts.tools import ParsedAnswer
    from ragblend.engine.results import Result

Response = TypeVar("Response", ChatResponse, CompletionResponse)
Raw = dict[str, Any]
# Arguments: the text so far; the new text; the answer's details, with the last one.
Respond = Callable[[str, str | None, "AnswerDetails | None"], Response]


@dataclass(frozen=True)
class AnswerDetails:
    """Fields of a response about the whole answer, besides its text."""

    raw: Raw
    parsed: "ParsedAnswer"
    logprobs: list[list[LogProb]] | None


class RAGBlendLLM(StructuredPrediction, ModelParameters, FunctionCallingLLM):
    """A local LLM that reuses the stored KV of the passages in its prompts; any prompt works, with or without them.

    Responses carry `raw = {"usage": ..., "kv": ...}` (in streams, the last one). Further keyword arguments of every
    method: max_new_tokens (or max_tokens), temperature, top_p, top_k, repetition_penalty, stop, seed, method, ratio,
    and `passages=` or `nodes=`, which name passages of the prompt without registering them.

    Example:
        `index.as_query_engine(llm=RAGBlendLLM())`
    """

    aliases = {"model_name": "model"} | ALIASES
    live_models = LIVE_MODELS

    max_new_tokens: int = Field(default=256, gt=0)
    """The most tokens of an answer."""
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More options of the engine, by its own names."""
    context_window: int | None = Field(default=None, gt=0)
    """Tokens; None for the model's own window."""
    is_chat_model: bool | None = None
    """None: True if the tokenizer has a chat template."""
    _last_stats: Raw | None = PrivateAttr(default=None)

    @classmethod
    def _handle_unknown(cls, given: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
        """Raise UsageError with the nearest known name."""
        name, *_ = unknown
        hint = did_you_mean(name, cls.model_fields) or f"; there are {', '.join(sorted(cls.model_fields))}"
        raise UsageError(f"{cls.__name__} has no parameter {name!r}{hint}")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> "RAGBlendLLM":
        """A shallow copy: LlamaIndex deep-copies components, which would also copy their callbacks."""
        return self.model_copy()

    @classmethod
    def class_name(cls) -> str:
        return "RAGBlendLLM"

    # --- properties

    @property
    def metadata(self) -> LLMMetadata:
        """Reads the model's config and tokenizer, never its weights, and only for missing values."""
        return LLMMetadata(
            context_window=self.context_window or self.backend.engine.context_window,
            num_output=self.max_new_tokens,
            is_chat_model=self._is_chat,
            is_function_calling_model=self._is_chat
            and self._own_prompt is None
            and self.backend.supports_tools,
            model_name=self.model,
        )

    @property
    def _is_chat(self) -> bool:
        if self.is_chat_model is not None:
            return self.is_chat_model
        return self.backend.engine.tokenizer.chat_template is not None

    @property
    def _own_prompt(self) -> Callable[[Sequence[ChatMessage]], str] | None:
        """The user's `messages_to_prompt`; None: use the model's chat template."""
        given = self.messages_to_prompt
        return None if given is generic_messages_to_prompt else given

    @property
    def last_stats(self) -> Raw | None:
        """`raw` of the request that finished last on this object, in any thread; None before the first.

        If several run at once, use each response's `raw`, or listen to `LLMChatEndEvent`.
        """
        return self._last_stats

    def to_payload(self) -> dict[str, Any]:
        """The payload of events, without paths, and without metadata, which could load a tokenizer."""
        fields = {name: getattr(self, name) for name in ("collection", *PER_CALL)}
        return {"class_name": self.class_name(), "model_name": self.model} | fields

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text by the model's tokenizer, for LlamaIndex's packers and splitters."""
        return self.backend.engine.runtime.tokenizing.passage_ids(text)

    @property
    def template_tokens(self) -> int:
        """Tokens that the chat template adds to a system and a user message, which LlamaIndex does not count."""
        empty = self.backend.chat_prompt([ChatTurn("system", ("",)), ChatTurn("user", ("",))])
        return len(self.backend.engine.tokenize(empty).token_ids)

    def remember(self, nodes: Nodes, encode: bool = False) -> None:
        """Register nodes, so that their texts are found in prompts, with their metadata or without.

        encode: store their KV (with their metadata) now, rather than on use.
        """
        nodes = list(nodes)
        self.backend.remember(alternative_passages_of(nodes))
        self.backend.remember(passages_of(nodes), encode=encode)

    def forget(self, node_ids: list[str]) -> int:
        """Unregister deleted nodes, and delete the KV that no other node shares."""
        find = self.backend.registry.node_ids_with_prefix
        alternatives = (found for node_id in node_ids for found in find(node_id + ALTERNATIVE_MARK))
        return self.backend.forget([*node_ids, *alternatives])

    # --- chat

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._answer(self._prepare_chat(messages, kwargs), _chat_response)

    @closing_with(llm_chat_callback())
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._stream(self._prepare_chat(messages, kwargs), _chat_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self._aanswer(self._prepare_chat(messages, kwargs), _chat_response)

    @closing_with(llm_chat_callback())
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return await self._astream(self._prepare_chat(messages, kwargs), _chat_response)

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
        """The arguments of `chat`. tool_choice: as in OpenAI's interface; `tool_required` is the same as `any`."""
        message = ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg
        messages = [*(chat_history or []), *([] if message is None else [message])]
        if isinstance(chat_history, FilledMessages):
            messages = FilledMessages(messages, chat_history.passages)
        return {
            "messages": messages,
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": tool_choice if tool_choice is not None else "any" if tool_required else None,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in an answer. Raises UsageError if there must be one and is none."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            is_cut = (response.raw or {}).get("finish_reason") == "length"
            why = "it reached max_new_tokens: allow more" if is_cut else repr(response.message.content)[:200]
            raise UsageError(f"the answer calls no tool: {why}")
        return [
            ToolSelection(tool_id=b.tool_call_id or "", tool_name=b.tool_name, tool_kwargs=arguments_of(b))
            for b in calls
        ]

    # --- completion

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._answer(self._prepare_completion(prompt, formatted, kwargs), _completion_response)

    @closing_with(llm_completion_callback())
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return self._stream(self._prepare_completion(prompt, formatted, kwargs), _completion_response)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return await self._aanswer(self._prepare_completion(prompt, formatted, kwargs), _completion_response)

    @closing_with(llm_completion_callback())
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        return await self._astream(self._prepare_completion(prompt, formatted, kwargs), _completion_response)

    # --- prompts

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        """Extends LlamaIndex's own: synthesizers may name passages (`passages=`, `nodes=`) besides the variables."""
        passages = _pop_passages(prompt, prompt_args)
        return FilledMessages(super()._get_messages(prompt, **prompt_args), passages)

    def _extend_messages(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Extends LlamaIndex's own, which programs call after they filled their templates themselves."""
        return FilledMessages(super()._extend_messages(messages), ())

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Extends LlamaIndex's own: the result carries the passages, and marks the template's own text."""
        passages = _pop_passages(prompt, prompt_args)
        given = (prompt.kwargs | prompt_args).items()
        texts = {name: value for name, value in given if isinstance(value, str)}
        marked = prompt_args | dict(zip(texts, placeholders(len(texts)), strict=True))
        parts = split_at_placeholders(super()._get_prompt(prompt, **marked), list(texts.values()))
        return FilledText.of(super()._get_prompt(prompt, **prompt_args), passages, parts)

    def _prepare_chat(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> PreparedCall:
        passages = messages.passages if isinstance(messages, FilledMessages) else None
        errors = partial(llama_index_errors, passages is not None)
        with errors():
            call = self._call_with_passages(passages, kwargs)
            return PreparedCall(call, partial(self._chat_prompt, call, messages, turns_of(messages)), errors)

    def _chat_prompt(self, call: Call, messages: Sequence[ChatMessage], turns: list[ChatTurn]) -> Prompt:
        """The prompt by the user's `messages_to_prompt` if there is one, else by the model's chat template."""
        own_prompt = self._own_prompt
        if own_prompt is None:
            return call.chat_prompt(turns)
        if call.answer_format.tools:
            raise UsageError(
                "messages_to_prompt writes the prompt, and would not show the model the tools that it may call; leave "
                "it out, or the tools"
            )
        texts = [text_of(message) for message in messages]
        marked = [
            message.model_copy(update={"blocks": [TextBlock(text=mark)]})
            for message, mark in zip(messages, placeholders(len(texts)), strict=True)
        ]
        return call.text_prompt(own_prompt(messages), split_at_placeholders(own_prompt(marked), texts))

    def _prepare_completion(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> PreparedCall:
        passages = prompt.passages if isinstance(prompt, FilledText) else None
        call = self._call_with_passages(passages, kwargs)
        errors = partial(llama_index_errors, passages is not None)
        return PreparedCall(call, partial(self._text_prompt, call, prompt, formatted), errors)

    def _text_prompt(self, call: Call, text: str, formatted: bool) -> Prompt:
        """A formatted prompt unchanged; else by the user's `completion_to_prompt`, or as a message to a chat model."""
        if formatted:
            return call.text_prompt(text, text.parts if isinstance(text, FilledText) else ())
        given = self.completion_to_prompt
        own_prompt = None if given is default_completion_to_prompt else given
        if own_prompt is None and self._is_chat:
            return call.chat_prompt(turns_of(self._extend_messages([ChatMessage(text)])))
        fill = own_prompt or self._extend_prompt
        return call.text_prompt(fill(text), split_at_placeholders(fill(*placeholders(1)), [text]))

    def _call_with_passages(self, passages: Any, kwargs: dict[str, Any]) -> Call:
        arguments = dict(kwargs)
        named = named_passages(arguments.pop("passages", passages), arguments.pop("nodes", None))
        return self._call(named, self.generate_kwargs, arguments)

    # --- running them

    def _answer(self, prepared: PreparedCall, respond: Respond[Response]) -> Response:
        return self._final_response(prepared.generate(), prepared.call, respond, None)

    async def _aanswer(self, prepared: PreparedCall, respond: Respond[Response]) -> Response:
        return self._final_response(await prepared.agenerate(), prepared.call, respond, None)

    def _stream(self, prepared: PreparedCall, respond: Respond[Response]) -> Generator[Response, None, None]:
        """The device starts at once; wrong arguments raise here."""
        response = self._item_to_response(prepared.call, respond)
        return (response(item) for item in prepared.stream())

    async def _astream(
        self, prepared: PreparedCall, respond: Respond[Response]
    ) -> AsyncGenerator[Response, None]:
        return _responses(self._item_to_response(prepared.call, respond), await prepared.astream())

    def _item_to_response(
        self, call: Call, respond: Respond[Response]
    ) -> "Callable[[str | Result], Response]":
        """A function that turns a stream's items into responses."""
        text = ""

        def response(item: "str | Result") -> Response:
            nonlocal text
            if not isinstance(item, str):
                return self._final_response(item, call, respond, "")
            text += item
            return respond(text, item, None)

        return response

    def _final_response(
        self, result: "Result", call: Call, respond: Respond[Response], delta: str | None
    ) -> Response:
        raw: Raw = {"usage": usage(result.report), "kv": kv_statistics(result)}
        raw["finish_reason"] = "stop" if result.stopped else "length"
        self._last_stats = raw
        parsed = call.parse(result)
        tokens = logprobs(result, self.backend.engine.tokenizer)
        log_probs = None if tokens is None else [_log_probs(token) for token in tokens]
        return respond(parsed.text, delta, AnswerDetails(raw, parsed, log_probs))


async def _responses(
    response: "Callable[[str | Result], Response]", items: "AsyncGenerator[str | Result, None]"
) -> AsyncGenerator[Response, None]:
    async with aclosing(items):
        async for item in items:
            yield response(item)


def _pop_passages(prompt: BasePromptTemplate, prompt_args: dict[str, Any]) -> tuple[Passage, ...]:
    """Remove the named passages from a template's arguments, unless the template has a variable of that name."""
    named = {
        name: prompt_args.pop(name, None)
        for name in ("passages", "nodes")
        if name not in prompt.template_vars
    }
    return named_passages(named.get("passages"), named.get("nodes"))


def _chat_response(text: str, delta: str | None, details: AnswerDetails | None) -> ChatResponse:
    if details is None:
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)
    calls = [
        ToolCallBlock(tool_call_id=c.id, tool_name=c.name, tool_kwargs=c.arguments)
        for c in details.parsed.calls
    ]
    text_blocks = [TextBlock(text=text)] if text or not calls else []
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[*text_blocks, *calls])
    if calls:  # where LlamaIndex's streamed programs look for calls
        message.additional_kwargs["tool_calls"] = [_openai_call(call) for call in calls]
    if details.parsed.broken is not None:
        broken = {"name": details.parsed.broken_name, "arguments": details.parsed.broken}
        message.additional_kwargs["invalid_tool_calls"] = [broken]
    return ChatResponse(message=message, delta=delta, raw=details.raw, logprobs=details.logprobs)


def _openai_call(call: ToolCallBlock) -> dict[str, Any]:
    function = {"name": call.tool_name, "arguments": json.dumps(call.tool_kwargs, ensure_ascii=False)}
    return {"id": call.tool_call_id, "type": "function", "function": function}


def _completion_response(text: str, delta: str | None, details: AnswerDetails | None) -> CompletionResponse:
    if details is None:
        return CompletionResponse(text=text, delta=delta)
    return CompletionResponse(text=text, delta=delta, raw=details.raw, logprobs=details.logprobs)


def _log_probs(token: dict[str, Any]) -> list[LogProb]:
    """The most likely tokens if requested, else the chosen one, as in LlamaIndex's OpenAI."""
    return [
        LogProb(token=each["token"], logprob=each["logprob"], bytes=each["bytes"] or [])
        for each in token["top_logprobs"] or [token]
    ]
