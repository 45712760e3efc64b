"""A tiny random Llama with a tokenizer of its own, on the real engine, and a few questions over the sample pages."""

import json

import pytest

TEXT = (
    "the tramway keeper rang a bell when low tide left the causeway dry and the engine named Dunlin burned sawdust "
    "until its boiler sang over marsh and harbour while children counted lamps along every crossing in winter rain"
)
WORDS = TEXT.split()
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def some_text(seed, words):
    """Different words for every seed, the same for the same one."""
    return " ".join(WORDS[(seed * 7 + place * (seed + 3)) % len(WORDS)] for place in range(words))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Four layers, a byte-level vocabulary, weights large enough that passages really change each other."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([some_text(seed, 200) for seed in range(5)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def engine(model_folder, home):
    """The real engine over the tiny model, closed afterwards."""
    from ragblend import Engine

    engine = Engine.open(
        model=str(model_folder), home=home, device="cpu", dtype="float32", collection="bench"
    )
    yield engine
    engine.close()


@pytest.fixture
def entries():
    """Four questions of three passages each, in the file's format."""
    return [
        {
            "ctxs": [{"title": f"page {q}{c}", "text": some_text(3 * q + c, 40)} for c in range(3)],
            "question": f"What did the keeper do on day {q}?",
            "answers": ["rang a bell", f"day {q}"],
        }
        for q in range(4)
    ]


@pytest.fixture
def data_file(entries, tmp_path):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


@pytest.fixture
def questions(data_file):
    from ragblend.app.bench.data import load

    return load(data_file).questions


@pytest.fixture
def asked(monkeypatch):
    """Every (prompt, options) that a framework's adapter has the engine answer; the answers stay the engine's."""
    from ragblend.integrations.calls import Call

    found, generate = [], Call.generate

    def listening(self, prompt):
        found.append((prompt, self.arguments))
        return generate(self, prompt)

    monkeypatch.setattr(Call, "generate", listening)
    return found


@pytest.fixture
def bench(model_folder, home, tmp_path):
    """`ragblend bench` as it is typed: bench(command, argument, ...) over the tiny model, with `out` for results."""
    from typer.testing import CliRunner

    from ragblend.app.bench.cli import bench_app

    def run(command, *arguments):
        where = ["--model", model_folder, "--home", home, "--device", "cpu", "--dtype", "float32"]
        line = [command, *where, "--output", tmp_path / "out", *arguments]
        return CliRunner().invoke(bench_app, [str(part) for part in line], catch_exceptions=False)

    return run
