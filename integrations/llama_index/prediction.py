"""`structured_predict` and its kin: the answer is held to the class's schema, whatever the model was taught."""

from collections.abc import AsyncGenerator, Generator
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.utils import create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import PydanticProgramMode
from pydantic import TypeAdapter

from ragblend.kvstore.errors import UsageError

_JSON = TypeAdapter(dict[str, Any])


class StructuredPrediction(FunctionCallingLLM):
    """LlamaIndex's own goes by a tool, or asks for JSON in words: it is taken where `pydantic_program_mode` says so."""

    @property
    def _is_held(self) -> bool:
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    def structured_predict(
        self,
        output_cls: type[Any],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """An object of that class. Raises PromptError for a class whose schema cannot be kept to."""
        if not self._is_held:
            return super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        messages, told = self._asked(output_cls, prompt, llm_kwargs, prompt_args)
        return _object(output_cls, self.chat(messages, **told).message.content)

    async def astructured_predict(
        self,
        output_cls: type[Any],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """The same, in an event loop."""
        if not self._is_held:
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        messages, told = self._asked(output_cls, prompt, llm_kwargs, prompt_args)
        return _object(output_cls, (await self.achat(messages, **told)).message.content)

    def stream_structured_predict(
        self,
        output_cls: type[Any],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """What is known so far, of a class whose fields are all optional; at the end, the object."""
        if not self._is_held:
            yield from super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        messages, told = self._asked(output_cls, prompt, llm_kwargs, prompt_args)
        text, partial = "", create_flexible_model(output_cls)
        for response in self.stream_chat(messages, **told):
            text = response.message.content or ""
            if response.raw is None and (found := _so_far(partial, text)) is not None:
                yield found
        yield _object(output_cls, text)

    async def astream_structured_predict(
        self,
        output_cls: type[Any],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """The same, in an event loop."""
        if not self._is_held:
            return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        messages, told = self._asked(output_cls, prompt, llm_kwargs, prompt_args)
        return self._astructured(output_cls, messages, told)

    async def _astructured(
        self, output_cls: type[Any], messages: list[ChatMessage], told: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        text, partial = "", create_flexible_model(output_cls)
        async for response in await self.astream_chat(messages, **told):
            text = response.message.content or ""
            if response.raw is None and (found := _so_far(partial, text)) is not None:
                yield found
        yield _object(output_cls, text)

    def _asked(
        self,
        output_cls: type[Any],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None,
        prompt_args: dict[str, Any],
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        """The messages, and what `chat` is told beside them."""
        told = {"json_schema": output_cls.model_json_schema()} | (llm_kwargs or {})
        return self._get_messages(prompt, **prompt_args), told


def _object(output_cls: type[Any], text: str | None) -> Any:
    try:
        return output_cls.model_validate_json(text or "")
    except ValidationError as error:
        raise UsageError(f"the answer is no {output_cls.__name__}: {error}; it was {text!r:.200}") from error


def _so_far(partial: type[Any], text: str) -> Any | None:
    try:
        found = _JSON.validate_json(text, experimental_allow_partial="trailing-strings")
        return partial.model_validate(found)
    except ValueError:
        return None
