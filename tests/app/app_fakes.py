"""Fakes of the engine and the embedder: small, exact, and counting their calls. Not a test file."""

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import numpy as np

from ragblend.app.answering.conversation import AskOptions, Conversations
from ragblend.engine.config import DecodeOptions, Report, Timings, TokenCounts
from ragblend.engine.model.gate import GateVerdict
from ragblend.engine.prompts.segments import Chunk, Literal, Prompt, with_ids
from ragblend.engine.results import Missing, Result
from ragblend.engine.selection import policy_named
from ragblend.engine.trace import Trace, TraceEvent
from ragblend.integrations.embeddings import windows_of_part
from ragblend.kvstore.errors import Cancelled, PromptTooLongError

WORDS = 64  # dimensions of the fake embeddings
BATCH_TEXTS = 8
SECRET = "CANARY the lighthouse keeper hides ruby RX-77012 behind the seventh stair of Harrow tower"


def _halves(text):
    """Two windows, as a long passage has."""
    words = text.split()
    middle = len(words) // 2
    return [" ".join(words[:middle]), " ".join(words[middle:])] if middle > 3 else [text]


def make_cross_encoder(folder, texts, labels=1, positions=64):
    """A BERT of two layers that knows these texts' words: random, with scores that are far apart."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    # Training would number the words otherwise each time, and some numberings rank as vectors do.
    plain = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = BertWordPieceTokenizer(vocab={word: n for n, word in enumerate([*marks, *plain])})
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    tokenizer = BertTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), model_max_length=positions)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=2000, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=positions, num_labels=labels, initializer_range=0.5,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def answer_of(workspace, question, **options):
    """The whole answer from the nearest passages, however far, by whatever engine the workspace has."""
    options = AskOptions(**options)
    return Conversations(workspace.workspaces).answer(question, options).whole()


class Killed(BaseException):
    """What a test has raised where a process would die."""


def write_files(folder, texts):
    """A folder of these files, by name, or by number where there are no names."""
    folder.mkdir(exist_ok=True)
    named = texts.items() if isinstance(texts, dict) else ((f"{n}.txt", text) for n, text in enumerate(texts))
    for name, text in named:
        (folder / name).write_text(text)
    return folder


class FakeEmbedder:
    """A bag of words, hashed: texts that share words are near each other."""

    name = "fake"

    def __init__(self):
        self.embedded, self.on_embed = [], lambda texts: None

    def load(self):
        pass

    def embed_passages(self, texts, progress=None, part="whole"):
        for start in range(0, len(texts), BATCH_TEXTS):
            batch = texts[start : start + BATCH_TEXTS]
            self.on_embed(batch)
            self.embedded += batch
            if progress:
                progress(start + len(batch), len(texts))
        return [self._vectors(windows_of_part(_halves(text), part)) for text in texts]

    def _vectors(self, halves):
        return np.array([self.embed_question(half) for half in halves]).reshape(-1, WORDS)

    def terms(self, words, cancel=None):
        return set()

    def embed_question(self, text, cancel=None):
        vector = np.full(WORDS, 1e-3, dtype=np.float32)
        for word in text.lower().split():
            vector[int(hashlib.sha256(word.strip(".,?!").encode()).hexdigest(), 16) % WORDS] += 1
        return vector / np.linalg.norm(vector)


class FakeEngine:
    """Counts words as tokens; "KV" is a file a node in the home, so that it outlives a killed process."""

    model_name, device, dtype, context_window, token_bytes = "fake", "cpu", "float32", 4096, 46_080
    most_characters = 1 << 20

    def __init__(self, home):
        self.folder, self.nodes = Path(home) / "fake-kv", Path(home) / "fake-nodes"
        self.needs_conversion, self.room_bytes, self.weights_loaded = False, 1 << 30, False
        self.verdict = GateVerdict(True)
        self.encoded, self.requests, self.waited = [], [], False
        self.needs_measurement = False
        self.sessions, self.prefilled, self.known_profile, self.on_piece = [], [], None, lambda number: None
        self.on_encode, self.on_prefill = lambda text: None, lambda: None
        self.reply = ("It ", "is ", "blue.")
        self.unsupported: tuple[str, ...] = ()  # figures of the reply
        self.misses, self.left_out, self.prefetched = 0, 0, []

    def prefetch(self, chunks):
        self.prefetched.append(chunks)

    def count_tokens(self, text):
        return len(text.split())

    def check_text(self, characters):
        if characters > self.most_characters:
            raise PromptTooLongError(f"{characters} characters")

    @property
    def gate(self):
        self.weights_loaded = True
        return self.verdict

    def enter(self, texts, node_ids):
        self.nodes.mkdir(exist_ok=True)
        for text, node in zip(texts, node_ids, strict=True):
            (self.nodes / node).write_text(text)

    def missing(self, node_ids):
        entered = [node for node in node_ids if (self.nodes / node).exists() and node not in self.stored()]
        tokens = sum(self.count_tokens((self.nodes / node).read_text()) for node in entered)
        return Missing(tuple(entered), tokens, tokens * 10, self.room_bytes, self.left_out)

    def encode_nodes(self, node_ids, cancel=None):
        self.folder.mkdir(exist_ok=True)
        self.weights_loaded = True
        for node in node_ids:
            if self.room_bytes <= 0:
                return
            text = (self.nodes / node).read_text() if (self.nodes / node).exists() else None
            if text is not None:
                self.on_encode(text)
                if cancel is not None and cancel.is_set():
                    raise Cancelled("left")
            if text is None or not (self.nodes / node).exists():  # deleted meanwhile
                yield 0
                continue
            (self.folder / node).write_text(text)
            self.encoded.append(text)
            self.room_bytes -= 10 * self.count_tokens(text)
            yield self.count_tokens(text)

    def hide(self, node_ids):
        for node in node_ids:
            (self.nodes / node).rename(self.nodes / f"hidden {node}")

    def unhide(self, node_ids):
        for node in node_ids:
            (self.nodes / f"hidden {node}").rename(self.nodes / node)

    def forget(self, node_ids):
        for node in node_ids:
            (self.nodes / node).unlink(missing_ok=True)
            (self.nodes / f"hidden {node}").unlink(missing_ok=True)
        files = [self.folder / node for node in node_ids if (self.folder / node).exists()]
        freed = sum(file.stat().st_size for file in files)
        for file in files:
            file.unlink()
        return freed

    def forget_all(self):
        """Nothing is learnt here: there are documents' nodes alone, which go with them."""
        return 0

    def stored(self):
        return {file.name for file in self.folder.iterdir()} if self.folder.exists() else set()

    def chat(self, messages):
        turns = [[Literal(f"<{message.role}>"), *message.segments] for message in messages]
        return Prompt([segment for turn in turns for segment in turn])

    def tokenize(self, prompt):
        self.check_text(sum(len(each.text) for each in prompt.segments if isinstance(each, Literal)))
        words = [(segment.text or "").split() for segment in prompt.segments]
        ids = [[crc32(word.encode()) for word in each] for each in words]
        return Prompt([with_ids(*both) for both in zip(prompt.segments, ids, strict=True)])

    def continue_logits(self, prefilled, token_ids):
        raise AssertionError("no test gets so far: comparisons are stopped before")

    def prefill(self, prompt, method="probe-shift", ratio=0.15, cancel=None):
        """`on_prefill` may set the event that cancels it."""
        self.prefilled.append((prompt, method))
        self.on_prefill()
        if cancel is not None and cancel.is_set():
            raise Cancelled("stopped")
        return SimpleNamespace(report=Report(method, None, timings=Timings(prefill_ms=1234.5)))

    def stream(self, prompt, method="probe-shift", ratio=0.15, session=None, client="", **options):
        """options: as `DecodeOptions` takes them."""
        policy_named(method)
        self.requests.append((prompt, method, DecodeOptions(**options)))
        self.sessions.append(session)
        tokens = TokenCounts(prompt=len(prompt.token_ids), reused=5, recomputed=1, fresh=2, generated=3)
        timings = Timings(1.0, 0.5, 0.1, 0.2, 7.0, 1.0, 10.0, 30.0, 99.0)
        chunks = sum(isinstance(segment, Chunk) for segment in prompt.segments)
        trace = Trace((TraceEvent("compute", "host", 0.0, 1.0, 0),))
        hits = chunks - self.misses
        report = Report(
            method,
            ratio,
            tokens,
            0.15,
            timings,
            hits,
            self.misses,
            trace=trace,
            unsupported_figures=self.unsupported,
        )
        self.stream_made = FakeStream(self.reply, report, prompt, self.on_piece)
        return self.stream_made

    def generate(self, prompt, cancel=None, on_text=None, **options):
        """What `stream` gives; `on_piece` may set the event that cancels it."""
        stream = self.stream(prompt, **options)
        for piece in stream:
            if cancel is not None and cancel.is_set():
                raise Cancelled("stopped")
            if on_text is not None:
                on_text(piece)
        return stream.result

    def finish_background(self, timeout_s=None):
        self.waited = True
        return True


class FakeStream:
    """on_piece(number) is called before each piece, and may raise what the work would."""

    def __init__(self, pieces, report, prompt, on_piece=lambda number: None):
        self._pieces, self._report, self._prompt, self._on_piece = pieces, report, prompt, on_piece
        self.result, self.closed, self.stopped = None, False, False

    def __iter__(self):
        for number, piece in enumerate(self._pieces):
            self._on_piece(number)
            if self.stopped:
                raise Cancelled("stopped")
            yield piece
        self.result = Result("".join(self._pieces), (1, 2, 3), self._report, self._prompt)

    def stop(self):
        self.stopped = True

    def close(self):
        self.closed = self.stopped = True
