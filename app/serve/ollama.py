"""Ollama's API (`/api/chat`, `/api/generate`, `/api/embed`, ...): translates requests to those of OpenAI's routes."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.serve.bodies import (
    MAX_MESSAGES,
    Body,
    ChatBody,
    CompletionBody,
    Count,
    EmbeddingBody,
    Int64,
    Items,
    OnlyOne,
    OwnOptions,
)
from ragblend.app.serve.chat import (
    CompletedChoice,
    EndpointFormat,
    respond,
    respond_to_chat,
    usage_and_kv,
)
from ragblend.app.serve.embed import embed_texts
from ragblend.app.serve.errors import ApiError, Dialect, json_response
from ragblend.app.serve.service import Service, client_of, service_of
from ragblend.integrations.threads import in_thread
from ragblend.kvstore.errors import UsageError

router = APIRouter(prefix="/api")
DIALECT = Dialect(lambda error: {"error": error.message}, has_json_lines=True)
Json = dict[str, Any]
# The type of a stream, for the API's description.
STREAM_RESPONSES: dict[int | str, Json] = {200: {"content": {"application/x-ndjson": {}}}}
# The version of Ollama whose API this is. Clients refuse servers whose version is too old for them.
VERSION = "0.12.11"
LATEST = ":latest"  # the tag that Ollama adds to a model's name without a tag
NO_LIMIT = 2**31 - 1  # in tokens: an answer ends at the latest where the context window does
# Options that have the same names in OpenAI's API.
SHARED_OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"
)  # fmt: skip
ZERO_DURATION = re.compile(r"[+-]?0+(\.0+)?(ns|us|µs|ms|s|m|h)?")
DETAILS = {"parent_model": "", "format": "", "family": "", "families": None, "parameter_size": ""}
OnlyZero = Annotated[float, Field(ge=0, le=0)]


class OllamaOptions(OwnOptions):
    """`options` of Ollama's requests. Unsupported ones that would change an answer are accepted
    only when switched off."""

    num_predict: Literal[-1, -2] | Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | Items[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: OnlyZero | None = None
    tfs_z: OnlyOne | None = None
    typical_p: OnlyOne | None = None
    # Accepted and ignored: they say how Ollama loads a model and divides its work. Clients always send them.
    num_ctx: Any = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, values: Any) -> Any:
        """Ignore null options: LangChain's embeddings send every option that Ollama ever had, as null."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    def openai_options(self) -> Json:
        """The options with OpenAI's names."""
        values = self.model_dump(include={*SHARED_OPTIONS, *OwnOptions.model_fields}, exclude_none=True)
        unlimited = self.num_predict in (-1, -2)
        return values | {
            "max_tokens": NO_LIMIT if unlimited else self.num_predict,
            "repetition_penalty": self.repeat_penalty,
        }


class OllamaBody(Body):
    """Fields of all of Ollama's requests. The model stays loaded, so keep_alive changes nothing."""

    model: str
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None

    def checked_name(self) -> str:
        """The model's name, without Ollama's own tag. Raises UsageError for a keep_alive that unloads the model."""
        if self.keep_alive is not None and ZERO_DURATION.fullmatch(str(self.keep_alive)):
            raise UsageError("keep_alive: 0 unloads the model, and this server keeps it loaded; leave it out")
        return self.model.removesuffix(LATEST)


class OllamaAnswerBody(OllamaBody):
    """Fields of `/api/chat` and `/api/generate`."""

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: Literal[False] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def openai_fields(self) -> Json:
        """These fields and the options, with OpenAI's names. Raises UsageError as `checked_name` does."""
        response_format: Json | None = None
        if self.format == "json":
            response_format = {"type": "json_object"}
        elif self.format:
            response_format = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": self.format},
            }
        options = self.options or OllamaOptions()
        return options.openai_options() | {
            "model": self.checked_name(),
            "stream": self.stream is not False,
            "response_format": response_format,
            "logprobs": self.logprobs or None,
            "top_logprobs": (self.top_logprobs or None) if self.logprobs else None,
        }


class OllamaMessage(Body):
    """A message of `/api/chat`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: Any = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaAnswerBody):
    """`/api/chat`."""

    messages: Annotated[Items[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: Items[dict[str, Any]] | None = None

    def to_chat_body(self) -> ChatBody:
        """Convert to a chat body. Raises UsageError for fields that are not supported."""
        values = self.openai_fields() | {
            "messages": list(_chat_messages(self.messages)),
            "tools": self.tools or None,
        }
        return ChatBody.translated(values)


class OllamaGenerateBody(OllamaAnswerBody):
    """`/api/generate`: a question, or, with `raw`, a text to continue without a chat template."""

    prompt: str = ""
    system: str = ""
    raw: bool | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[int], Field(max_length=0)] | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None

    def to_chat_body(self) -> ChatBody:
        """Convert to a chat body. Raises UsageError for fields that are not supported."""
        texts = (("system", self.system), ("user", self.prompt))
        messages = [{"role": role, "content": text} for role, text in texts if text]
        return ChatBody.translated(self.openai_fields() | {"messages": messages})

    def to_completion_body(self) -> CompletionBody:
        """Convert to a body of `/v1/completions`. Raises UsageError for fields that are not supported."""
        values = self.openai_fields()
        if values.pop("response_format") or self.system:
            raise UsageError("raw: the text is continued as it is, so leave out format and system")
        logprobs, top = values.pop("logprobs"), values.pop("top_logprobs")
        values |= {"prompt": self.prompt, "logprobs": (top or 0) if logprobs else None}
        return CompletionBody.translated(values)


class OllamaEmbedBody(OllamaBody):
    """`/api/embed`. Long texts are embedded completely, in parts, so truncate changes nothing."""

    input: str | Items[str]
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsBody(OllamaBody):
    """`/api/embeddings`, the older form for one text."""

    prompt: str


class OllamaShowBody(Body):
    """`/api/show`. Only the model counts; Ollama's own client sends the other fields, too, but empty."""

    model: str
    name: Any = None
    system: Any = None
    template: Any = None
    options: Any = None
    verbose: Any = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, values: Any) -> Any:
        """Older clients name the model in `name`."""
        is_older = isinstance(values, dict) and values.get("name") and not values.get("model")
        return values | {"model": values["name"]} if is_older else values


@router.post("/chat", responses=STREAM_RESPONSES)
async def ollama_chat(request: Request, body: OllamaChatBody) -> Response:
    """Answer a conversation as `/v1/chat/completions` does; without messages, start loading the model."""
    if not body.messages:
        return await _start_loading(request, body, {"message": {"role": "assistant", "content": ""}})
    return await respond_to_chat(request, body.to_chat_body(), OllamaChatFormat)


@router.post("/generate", responses=STREAM_RESPONSES)
async def ollama_generate(request: Request, body: OllamaGenerateBody) -> Response:
    """Answer one question, or continue a text; without a prompt, start loading the model."""
    if not body.prompt:
        return await _start_loading(request, body, {"response": ""})
    if body.raw:
        completion = body.to_completion_body()
        return await respond(
            request, completion, lambda call: [call.text_prompt(body.prompt)], OllamaGenerateFormat
        )
    return await respond_to_chat(request, body.to_chat_body(), OllamaGenerateFormat)


@router.post("/embed")
async def ollama_embed(request: Request, body: OllamaEmbedBody) -> Response:
    """Embed texts as unit vectors."""
    started_ns = time.monotonic_ns()
    values = {"model": body.checked_name(), "input": body.input, "dimensions": body.dimensions}
    vectors, count = await embed_texts(request, EmbeddingBody.translated(values))
    total_ns = time.monotonic_ns() - started_ns
    return json_response(
        {
            "model": body.model,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": total_ns,
            "load_duration": 0,
            "prompt_eval_count": count,
        }
    )


@router.post("/embeddings")
async def ollama_embeddings(request: Request, body: OllamaEmbeddingsBody) -> Response:
    """Embed one text as a unit vector."""
    values = {"model": body.checked_name(), "input": body.prompt}
    [vector], _ = await embed_texts(request, EmbeddingBody.translated(values))
    return json_response({"embedding": vector.tolist()})


@router.get("/tags")
async def tags(request: Request) -> Response:
    """List the models: the one that answers, the embedder, and the reranker, if there is one."""
    service = service_of(request)
    return json_response({"models": [_model_entry(service, name) for name in service.models]})


@router.get("/ps")
async def running(request: Request) -> Response:
    """List the model that answers, once it is loaded. It stays loaded."""
    service = service_of(request)
    if service.startup.is_loading or service.startup.problem:
        return json_response({"models": []})
    window = await in_thread(lambda: service.backend(client_of(request)).engine.context_window)
    more = {"expires_at": "9999-12-31T23:59:59Z", "context_length": window}
    return json_response({"models": [_model_entry(service, service.model) | more]})


@router.post("/show")
async def show(request: Request, body: OllamaShowBody) -> Response:
    """Describe what a model can do, and its context window."""
    service = service_of(request)
    name = service.listed_model(body.model.removesuffix(LATEST))
    description: Json = {"details": DETAILS, "modified_at": _time(service.started_at), "model_info": {}}
    if name != service.model:
        kind = "embedding" if name != service.reranker else "rerank"
        return json_response(description | {"capabilities": [kind]})

    def describe() -> Json:
        backend = service.backend(client_of(request))
        capabilities = ["completion", "tools"] if backend.supports_tools else ["completion"]
        window = backend.engine.context_window
        info = {"general.architecture": "ragblend", "ragblend.context_length": window}
        return description | {"capabilities": capabilities, "model_info": info}

    return json_response(await in_thread(describe))


@router.get("/version")
async def version(request: Request) -> Response:
    """The version of Ollama whose API this is."""
    return json_response({"version": VERSION})


@router.post("/pull")
@router.post("/push")
@router.post("/create")
@router.post("/copy")
@router.delete("/delete")
async def refuse_management(request: Request) -> Response:
    """Refuse to add, change or remove models."""
    model, action = service_of(request).model, request.url.path.rsplit("/", 1)[-1]
    message = (
        f"This server has one model, {model!r}, and cannot {action} any; `ragblend models` manages models."
    )
    raise ApiError(400, message, "unsupported")


class OllamaGenerateFormat(EndpointFormat):
    """`/api/generate`. The last line of a stream has no text, but the counts and durations."""

    def __init__(self, model: str) -> None:
        self._model, self._started_ns = model, time.monotonic_ns()

    def whole(self, completed: Sequence[CompletedChoice]) -> Json:
        [answer] = completed
        return self._line(answer.parsed.text, _tool_calls(answer)) | self._last_fields(answer)

    def events(self, index: int, piece: str | CompletedChoice, is_first: bool) -> Iterator[Json]:
        if isinstance(piece, str):
            yield self._line(piece)
            return
        if calls := _tool_calls(piece):
            yield self._line("", calls)
        yield self._line("") | self._last_fields(piece)

    def _line(self, text: str, calls: Sequence[Json] = ()) -> Json:
        return {"model": self._model, "created_at": _time(), **self._content(text, calls), "done": False}

    def _content(self, text: str, calls: Sequence[Json]) -> Json:
        return {"response": text}

    def _last_fields(self, answer: CompletedChoice) -> Json:
        """Counts, and durations in ns. load_duration: all before the prefill, such as waiting for the device."""
        report, found = answer.result.report, usage_and_kv([answer])
        total_ns = time.monotonic_ns() - self._started_ns
        prefill_ns, answer_ns = (round(ms * 1e6) for ms in (report.timings.ttft_ms, report.timings.total_ms))
        logprobs = {} if answer.logprobs is None else {"logprobs": answer.logprobs}
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": total_ns,
            "load_duration": max(0, total_ns - answer_ns),
            "prompt_eval_count": found["usage"]["prompt_tokens"],
            "prompt_eval_duration": prefill_ns,
            "eval_count": found["usage"]["completion_tokens"],
            "eval_duration": max(0, answer_ns - prefill_ns),
            "kv": found["kv"],
            **logprobs,
        }


class OllamaChatFormat(OllamaGenerateFormat):
    """`/api/chat`."""

    def _content(self, text: str, calls: Sequence[Json]) -> Json:
        more = {"tool_calls": list(calls)} if calls else {}
        return {"message": {"role": "assistant", "content": text, **more}}


async def _start_loading(request: Request, body: OllamaAnswerBody, content: Json) -> Response:
    service = service_of(request)
    service.check_model(body.checked_name())
    # An empty prefetch loads the model in the background.
    await in_thread(lambda: service.backend(client_of(request)).engine.prefetch(()))
    last_fields = {"done": True, "done_reason": "load"}
    return json_response({"model": service.model, "created_at": _time(), **content, **last_fields})


def _chat_messages(messages: Sequence[OllamaMessage]) -> Iterator[Json]:
    """Chat messages. Calls may have no ids in this API: a result answers the first open call, of its id and its tool
    if they are named.
    """
    open_calls: list[tuple[str, Any]] = []  # (id, name) of calls without a result
    call_count = 0
    for index, message in enumerate(messages):
        chat_message: Json = {
            "role": message.role,
            "content": message.content or "",
            "reasoning_content": message.thinking,
        }
        if message.role == "tool":
            chat_message["role"] = "function"  # unlike `tool`, it needs no call, as in Ollama's API
            wanted, tool = message.tool_call_id or None, message.tool_name
            fitting = [each for each in open_calls if wanted in (None, each[0]) and tool in (None, each[1])]
            for answered in fitting[:1]:
                open_calls.remove(answered)
                wanted = answered[0]
            chat_message["tool_call_id"] = wanted
            chat_message["name"] = message.tool_name
        calls = []
        for number, call in enumerate(message.tool_calls or ()):
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
                raise UsageError(
                    f"messages[{index}].tool_calls[{number}].function.arguments must be an object"
                )
            call_id, call_count = str(call.get("id") or f"call{call_count:05}"), call_count + 1
            open_calls.append((call_id, function.get("name")))
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            calls.append(
                {"id": call_id, "type": "function", "function": {**function, "arguments": arguments}}
            )
        yield chat_message | ({"tool_calls": calls} if calls else {})


def _tool_calls(answer: CompletedChoice) -> list[Json]:
    """The complete calls. One that was cut off is left out, because this API's arguments must be a whole object."""
    return [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.parsed.calls
    ]


def _model_entry(service: Service, name: str) -> Json:
    return {"name": name, "model": name, "modified_at": _time(service.started_at), "details": DETAILS}


def _time(seconds: float | None = None) -> str:
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")
