"""Ollama's API (`/api/chat`, `/api/generate`, `/api/embed`, ...): translated to the bodies of OpenAI's routes."""

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
    MOST_MESSAGES,
    Body,
    ChatBody,
    CompletionBody,
    Count,
    EmbeddingBody,
    Items,
    Long,
    OwnOptions,
)
from ragblend.app.serve.chat import (
    CompletedChoice,
    EndpointFormat,
    respond,
    respond_to_chat,
    usage_and_kv,
)
from ragblend.app.serve.embed import embedded
from ragblend.app.serve.errors import ApiError, Dialect, json_response
from ragblend.app.serve.service import Service, client_of, service_of
from ragblend.integrations.threads import in_thread
from ragblend.kvstore.errors import UsageError

router = APIRouter(prefix="/api")
DIALECT = Dialect(lambda error: {"error": error.message}, has_lines=True)
Json = dict[str, Any]
LINES: dict[int | str, Json] = {200: {"content": {"application/x-ndjson": {}}}}  # what a stream is
# The version of Ollama whose API this is: clients refuse servers that they take for too old.
VERSION = "0.12.11"
LATEST = ":latest"  # Ollama's tag for a name without one
NO_LIMIT = 2**31 - 1  # tokens; the model's window ends the answer
# Options that have OpenAI's names.
SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
ZERO = re.compile(r"[+-]?0+(\.0+)?(ns|us|µs|ms|s|m|h)?")
DETAILS = {"parent_model": "", "format": "", "family": "", "families": None, "parameter_size": ""}
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]


class OllamaOptions(OwnOptions):
    """`options` of Ollama's requests. Those that could only be ignored, but would change an answer, must be off."""

    num_predict: Literal[-1, -2] | Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    seed: Long | None = None
    stop: str | Items[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: Zero | None = None
    tfs_z: One | None = None
    typical_p: One | None = None
    # How Ollama loads a model and splits its work: clients send them always, and no answer depends on them.
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
        """LangChain's embeddings send every option that Ollama ever had, as null."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    def translated_options(self) -> Json:
        """The options by OpenAI's names."""
        values = self.model_dump(include={*SAME, *OwnOptions.model_fields}, exclude_none=True)
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

    def name(self) -> str:
        """The model's name, without Ollama's own tag. Raises UsageError for a keep_alive that unloads it."""
        if self.keep_alive is not None and ZERO.fullmatch(str(self.keep_alive)):
            raise UsageError("keep_alive: 0 unloads the model, and this server keeps it loaded; leave it out")
        return self.model.removesuffix(LATEST)


class OllamaAnswerBody(OllamaBody):
    """Fields of `/api/chat` and `/api/generate`."""

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: Literal[False] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def common(self) -> Json:
        """The fields by OpenAI's names."""
        wanted: Json | None = None
        if self.format == "json":
            wanted = {"type": "json_object"}
        elif self.format:
            wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format}}
        options = self.options or OllamaOptions()
        return options.translated_options() | {
            "model": self.name(),
            "stream": self.stream is not False,
            "response_format": wanted,
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

    messages: Annotated[Items[OllamaMessage], Field(max_length=MOST_MESSAGES)] = Field(default_factory=list)
    tools: Items[dict[str, Any]] | None = None

    def chat(self) -> ChatBody:
        """Raises UsageError for what the model cannot do."""
        values = self.common() | {"messages": list(_messages(self.messages)), "tools": self.tools or None}
        return ChatBody.translated(values, "by OpenAI's name")


class GenerateBody(OllamaAnswerBody):
    """`/api/generate`: a question, or with `raw` a text to continue without a chat template."""

    prompt: str = ""
    system: str = ""
    raw: bool | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[int], Field(max_length=0)] | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None

    def chat(self) -> ChatBody:
        """Raises UsageError for what the model cannot do."""
        said = (("system", self.system), ("user", self.prompt))
        turns = [{"role": role, "content": text} for role, text in said if text]
        return ChatBody.translated(self.common() | {"messages": turns}, "by OpenAI's name")

    def completion(self) -> CompletionBody:
        """Raises UsageError for what the model cannot do."""
        values = self.common()
        if values.pop("response_format") or self.system:
            raise UsageError("raw: the text is continued as it stands, so leave format and system out")
        logprobs, top = values.pop("logprobs"), values.pop("top_logprobs")
        values |= {"prompt": self.prompt, "logprobs": (top or 0) if logprobs else None}
        return CompletionBody.translated(values, "by OpenAI's name")


class OllamaEmbedBody(OllamaBody):
    """`/api/embed`. Long texts are embedded whole, in parts, so truncate changes nothing."""

    input: str | Items[str]
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsBody(OllamaBody):
    """`/api/embeddings`, the older form for one text."""

    prompt: str


class ShowBody(Body):
    """`/api/show`. Ollama's own client sends the other fields empty."""

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


@router.post("/chat", responses=LINES)
async def ollama_chat(request: Request, body: OllamaChatBody) -> Response:
    """Answer a conversation as `/v1/chat/completions` does; without messages, load the model."""
    if not body.messages:
        return await _loaded(request, body, {"message": {"role": "assistant", "content": ""}})
    return await respond_to_chat(request, body.chat(), OllamaChatFormat)


@router.post("/generate", responses=LINES)
async def ollama_generate(request: Request, body: GenerateBody) -> Response:
    """Answer one question, or continue a text; without a prompt, load the model."""
    if not body.prompt:
        return await _loaded(request, body, {"response": ""})
    if body.raw:
        text = body.completion()
        return await respond(request, text, lambda call: [call.text_prompt(body.prompt)], GenerateFormat)
    return await respond_to_chat(request, body.chat(), GenerateFormat)


@router.post("/embed")
async def ollama_embed(request: Request, body: OllamaEmbedBody) -> Response:
    """Embed texts; each vector has length 1."""
    began = time.monotonic_ns()
    values = {"model": body.name(), "input": body.input, "dimensions": body.dimensions}
    vectors, count = await embedded(request, EmbeddingBody.translated(values, "by OpenAI's name"))
    took = {"total_duration": time.monotonic_ns() - began, "load_duration": 0, "prompt_eval_count": count}
    return json_response({"model": body.model, "embeddings": [vector.tolist() for vector in vectors], **took})


@router.post("/embeddings")
async def ollama_embeddings(request: Request, body: OllamaEmbeddingsBody) -> Response:
    """Embed one text."""
    values = {"model": body.name(), "input": body.prompt}
    [vector], _ = await embedded(request, EmbeddingBody.translated(values, "by OpenAI's name"))
    return json_response({"embedding": vector.tolist()})


@router.get("/tags")
async def tags(request: Request) -> Response:
    """List the models: the one that answers, the embedder, and the reranker, if there is one."""
    service = service_of(request)
    return json_response({"models": [_entry(service, name) for name in service.models]})


@router.get("/ps")
async def running(request: Request) -> Response:
    """List the model that answers, once it is loaded; it stays so."""
    service = service_of(request)
    if service.startup.is_loading or service.startup.problem:
        return json_response({"models": []})
    window = await in_thread(lambda: service.backend(client_of(request)).engine.context_window)
    more = {"expires_at": "9999-12-31T23:59:59Z", "context_length": window}
    return json_response({"models": [_entry(service, service.model) | more]})


@router.post("/show")
async def show(request: Request, body: ShowBody) -> Response:
    """What a model can do, and how long its prompts may be."""
    service = service_of(request)
    name = service.listed_model(body.model.removesuffix(LATEST))
    about: Json = {"details": DETAILS, "modified_at": _time(service.begun), "model_info": {}}
    if name != service.model:
        kind = "embedding" if name != service.reranker else "rerank"
        return json_response(about | {"capabilities": [kind]})

    def described() -> Json:
        backend = service.backend(client_of(request))
        can = ["completion", "tools"] if backend.supports_tools else ["completion"]
        window = backend.engine.context_window
        info = {"general.architecture": "ragblend", "ragblend.context_length": window}
        return about | {"capabilities": can, "model_info": info}

    return json_response(await in_thread(described))


@router.get("/version")
async def version(request: Request) -> Response:
    """The version of Ollama whose API this is."""
    return json_response({"version": VERSION})


@router.post("/pull")
@router.post("/push")
@router.post("/create")
@router.post("/copy")
@router.delete("/delete")
async def manage(request: Request) -> Response:
    """Refuse to change which models there are."""
    model, action = service_of(request).model, request.url.path.rsplit("/", 1)[-1]
    message = (
        f"This server has one model, {model!r}, and cannot {action} any; `ragblend models` manages models."
    )
    raise ApiError(400, message, "unsupported")


class GenerateFormat(EndpointFormat):
    """`/api/generate`: a stream's last line has no text, but the counts."""

    def __init__(self, model: str) -> None:
        self._model, self._began = model, time.monotonic_ns()

    def whole(self, chosen: Sequence[CompletedChoice]) -> Json:
        [answer] = chosen
        return self._line(answer.said.text, _calls(answer)) | self._end(answer)

    def events(self, index: int, piece: str | CompletedChoice, is_first: bool) -> Iterator[Json]:
        if isinstance(piece, str):
            yield self._line(piece)
            return
        if calls := _calls(piece):
            yield self._line("", calls)
        yield self._line("") | self._end(piece)

    def _line(self, text: str, calls: Sequence[Json] = ()) -> Json:
        return {"model": self._model, "created_at": _time(), **self._said(text, calls), "done": False}

    def _said(self, text: str, calls: Sequence[Json]) -> Json:
        return {"response": text}

    def _end(self, answer: CompletedChoice) -> Json:
        """Durations in ns; load_duration: all before the prompt was read, such as waiting for the device."""
        report, found = answer.result.report, usage_and_kv([answer])
        total = time.monotonic_ns() - self._began
        prompt, whole = (round(ms * 1e6) for ms in (report.timings.ttft_ms, report.timings.total_ms))
        likely = {} if answer.logprobs is None else {"logprobs": answer.logprobs}
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": total,
            "load_duration": max(0, total - whole),
            "prompt_eval_count": found["usage"]["prompt_tokens"],
            "prompt_eval_duration": prompt,
            "eval_count": found["usage"]["completion_tokens"],
            "eval_duration": max(0, whole - prompt),
            "kv": found["kv"],
            **likely,
        }


class OllamaChatFormat(GenerateFormat):
    """`/api/chat`."""

    def _said(self, text: str, calls: Sequence[Json]) -> Json:
        more = {"tool_calls": list(calls)} if calls else {}
        return {"message": {"role": "assistant", "content": text, **more}}


async def _loaded(request: Request, body: OllamaAnswerBody, said: Json) -> Response:
    service = service_of(request)
    service.check_model(body.name())
    await in_thread(lambda: service.backend(client_of(request)).engine.prefetch(()))
    end = {"done": True, "done_reason": "load"}
    return json_response({"model": service.model, "created_at": _time(), **said, **end})


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[Json]:
    """The messages of a chat. Calls have no ids in this API: results answer them in order, or by the tool's name."""
    open_calls: list[tuple[str, Any]] = []  # (id, name)
    made = 0
    for at, message in enumerate(messages):
        turn: Json = {
            "role": message.role,
            "content": message.content or "",
            "reasoning_content": message.thinking,
        }
        if message.role == "tool":
            turn["role"] = "function"  # a result that need not have a call: this API does not ask for one
            answered = next((each for each in open_calls if message.tool_name in (None, each[1])), None)
            if answered is not None:
                open_calls.remove(answered)
            turn["tool_call_id"] = message.tool_call_id or (answered or (None,))[0]
            turn["name"] = message.tool_name
        calls = []
        for number, call in enumerate(message.tool_calls or ()):
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
                raise UsageError(
                    f"messages[{at}].tool_calls[{number}]: arguments must be an object of `function`"
                )
            call_id, made = str(call.get("id") or f"call{made:05}"), made + 1
            open_calls.append((call_id, function.get("name")))
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            calls.append(
                {"id": call_id, "type": "function", "function": {**function, "arguments": arguments}}
            )
        yield turn | ({"tool_calls": calls} if calls else {})


def _calls(answer: CompletedChoice) -> list[Json]:
    """The whole calls: one that was cut short has no arguments that this API could write."""
    return [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.said.calls
    ]


def _entry(service: Service, name: str) -> Json:
    return {"name": name, "model": name, "modified_at": _time(service.begun), "details": DETAILS}


def _time(seconds: float | None = None) -> str:
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")
