"""`structured_predict` and its variants: decoding is constrained to the class's schema, for any model."""

from collections.abc import AsyncGenerator, Generator
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.utils import create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import PydanticProgramMode
from pydantic import TypeAdapter

from ragblend.kvstore.errors import UsageError

_JSON = TypeAdapter(dict[str, Any])
LlmKwargs = dict[str, Any] | None


class StructuredPrediction(FunctionCallingLLM):
    """Gives objects of a class by constrained decoding; other values of `pydantic_program_mode` select LlamaIndex's own
    methods (tool calls or text).

    Raises PromptError for a class whose schema is not supported.
    """

    @property
    def _uses_constrained_decoding(self) -> bool:
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    def structured_predict(
        self, output_cls: type[Any], prompt: BasePromptTemplate, llm_kwargs: LlmKwargs = None, **args: Any
    ) -> Any:
        """An object of that class."""
        if not self._uses_constrained_decoding:
            return super().structured_predict(output_cls, prompt, llm_kwargs, **args)
        messages, options = self._request(output_cls, prompt, llm_kwargs, args)
        return _validated(output_cls, self.chat(messages, **options).message.content)

    async def astructured_predict(
        self, output_cls: type[Any], prompt: BasePromptTemplate, llm_kwargs: LlmKwargs = None, **args: Any
    ) -> Any:
        """As `structured_predict`, in an event loop."""
        if not self._uses_constrained_decoding:
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **args)
        messages, options = self._request(output_cls, prompt, llm_kwargs, args)
        return _validated(output_cls, (await self.achat(messages, **options)).message.content)

    def stream_structured_predict(
        self, output_cls: type[Any], prompt: BasePromptTemplate, llm_kwargs: LlmKwargs = None, **args: Any
    ) -> Generator[Any, None, None]:
        """Partial objects, of a class with the same fields, all optional; at the end, the object."""
        if not self._uses_constrained_decoding:
            yield from super().stream_structured_predict(output_cls, prompt, llm_kwargs, **args)
            return
        messages, options = self._request(output_cls, prompt, llm_kwargs, args)
        text, flexible = "", create_flexible_model(output_cls)
        for response in self.stream_chat(messages, **options):
            text = response.message.content or ""
            if (partial := _partial_object(flexible, response)) is not None:
                yield partial
        yield _validated(output_cls, text)

    async def astream_structured_predict(
        self, output_cls: type[Any], prompt: BasePromptTemplate, llm_kwargs: LlmKwargs = None, **args: Any
    ) -> AsyncGenerator[Any, None]:
        """As `stream_structured_predict`, in an event loop."""
        if not self._uses_constrained_decoding:
            return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **args)
        messages, options = self._request(output_cls, prompt, llm_kwargs, args)
        return self._astream_objects(output_cls, messages, options)

    async def _astream_objects(
        self, output_cls: type[Any], messages: list[ChatMessage], options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        text, flexible = "", create_flexible_model(output_cls)
        async for response in await self.astream_chat(messages, **options):
            text = response.message.content or ""
            if (partial := _partial_object(flexible, response)) is not None:
                yield partial
        yield _validated(output_cls, text)

    def _request(
        self,
        output_cls: type[Any],
        prompt: BasePromptTemplate,
        llm_kwargs: LlmKwargs,
        args: dict[str, Any],
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        """The messages and options of `chat`."""
        options = {"json_schema": output_cls.model_json_schema()} | (llm_kwargs or {})
        return self._get_messages(prompt, **args), options


def _validated(output_cls: type[Any], text: str | None) -> Any:
    try:
        return output_cls.model_validate_json(text or "")
    except ValidationError as error:
        raise UsageError(
            f"the answer is no valid {output_cls.__name__}: {error}; it was {text!r:.200}"
        ) from error


def _partial_object(flexible: type[Any], response: ChatResponse) -> Any | None:
    """The object so far; None if there is none yet, and for the last response."""
    if response.raw is not None:
        return None
    try:
        text = response.message.content or ""
        found = _JSON.validate_json(text, experimental_allow_partial="trailing-strings")
        return flexible.model_validate(found)
    except ValueError:
        return None
