"""400 requests, 8 at a time, a quarter aborted, some preempted, while passages are deleted and damaged."""

import random

import pytest
import tiny_models
from vllm_helpers import SHAPE, passage

REQUESTS, AT_ONCE, TOKENS = 400, 8, 24
ABORTS, HARMS = 0.08, 0.04  # a step
LASTING = [passage(number, 45) for number in range(8)]
PASSING = [passage(number, 45) for number in range(100, 108)]  # deleted or damaged during the run


class Storm:
    """Requests made of few prompts, and vLLM's engine stepped by hand."""

    def __init__(self, server, seed: int) -> None:
        self.chosen, self.server = random.Random(seed), server
        self.engine = server.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        orders = [self.chosen.sample(LASTING, 3) for _ in range(12)]
        shaky = [[*self.chosen.sample(LASTING, 2), text] for text in PASSING]
        self.prompts = [server.ids(order) for order in orders + shaky]
        self.sound, self.shaky = range(len(orders)), range(len(orders), len(self.prompts))
        self.aborted, self.deleted, self.damaged = 0, 0, 0

    def alone(self, number: int, off: bool = False) -> tuple[int, ...]:
        """The answer with an empty cache and no other request; off: by vLLM alone."""
        self.server.llm.reset_prefix_cache()
        [output] = self.server.ask([self.prompts[number]], [{"off": off}], max_tokens=TOKENS, logprobs=None)
        self.server.llm.reset_prefix_cache()
        return tuple(output.outputs[0].token_ids)

    def lose(self) -> None:
        """Delete all PASSING passages."""
        for text in PASSING:
            self.server.engine.runtime.store.delete([self.server.key_of(text)])

    def restore(self) -> None:
        """Encode them again."""
        self.lose()
        assert self.server.engine.encode(PASSING).encoded == len(PASSING)

    def run(self) -> dict[str, tuple[int, bool, tuple[int, ...]]]:
        """Finished answers by request: (prompt, off, token ids)."""
        from vllm import SamplingParams

        running, finished, sent = dict[str, tuple[int, bool]](), {}, 0
        while running or sent < REQUESTS:
            while len(running) < AT_ONCE and sent < REQUESTS:
                number = self.chosen.randrange(len(self.prompts))
                off = self.chosen.random() < 0.3
                said = {"kv_transfer_params": {"off": off}}
                sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, extra_args=said)
                self.engine.add_request(f"r{sent}", {"prompt_token_ids": self.prompts[number]}, sampling)
                running[f"r{sent}"] = number, off
                sent += 1
            for output in self.engine.step():
                if output.finished and output.request_id in running:
                    asked, said = running.pop(output.request_id), tuple(output.outputs[0].token_ids)
                    finished[output.request_id] = (*asked, said)
            if running and self.chosen.random() < ABORTS:
                gone = self.chosen.choice(sorted(running))
                self.engine.abort_request([gone], internal=False)
                del running[gone]
                self.aborted += 1
            if self.chosen.random() < HARMS:
                self.harm()
        for _ in range(3):
            self.engine.step()
        return finished

    def harm(self) -> None:
        """Delete or damage a passage that is there."""
        store, key = self.server.engine.runtime.store, self.server.key_of(self.chosen.choice(PASSING))
        if not store.contains(key):
            return
        if self.chosen.random() < 0.5:
            self.deleted += store.delete([key]) > 0
            return
        for file in (self.server.home / "kv").rglob(f"*{key.digest}*"):
            if file.is_file():
                held = bytearray(file.read_bytes())
                held[-4000:] = bytes(0xFF - byte for byte in held[-4000:])  # some of the last layer
                file.write_bytes(held)
                self.damaged += 1


@pytest.mark.parametrize("caching", [True, False])
def test_no_answer_is_wrong_and_nothing_is_left_behind(serving, caching, tmp_path):
    folder = tiny_models.save_model("llama", tmp_path / "model", is_endless=True, **SHAPE)
    server = serving(
        folder, tmp_path / "home", {"encode_missing": False}, enable_prefix_caching=caching, max_model_len=512,
        num_gpu_blocks_override=56,
    )  # fmt: skip
    texts = LASTING + PASSING
    server.engine.encode(texts, [f"p{n}" for n in range(len(texts))])
    storm = Storm(server, seed=7)
    numbers = range(len(storm.prompts))
    plain = [storm.alone(number, off=True) for number in numbers]
    fused = [storm.alone(number) for number in numbers]
    storm.lose()
    lacking = {number: storm.alone(number) for number in storm.shaky}
    storm.restore()
    assert fused == [storm.alone(number) for number in numbers], "encoded again it is the same"
    assert sum(fused[n] != plain[n] for n in storm.sound) > 3, "fusing changes no answer"
    assert sum(lacking[n] not in (fused[n], plain[n]) for n in storm.shaky) > 1, "missing changes none"
    pool = storm.core.scheduler.kv_cache_manager.block_pool
    free, scheduler = pool.get_num_free_blocks(), storm.core.scheduler
    preempted, preempt = [], scheduler._preempt_request
    scheduler._preempt_request = lambda request, *args, **more: (
        preempted.append(request.request_id), preempt(request, *args, **more)
    )  # fmt: skip
    side, finished = scheduler.connector._scheduler, storm.run()
    assert storm.aborted >= 90 and len(finished) == REQUESTS - storm.aborted and preempted
    assert storm.deleted and storm.damaged
    assert not [name for name, (number, off, said) in finished.items() if off and said != plain[number]]
    asked = {name: (number, said) for name, (number, off, said) in finished.items() if not off}
    assert any(said == lacking.get(n) != fused[n] for n, said in asked.values()), "no passage was missed"
    # Also of prompts that were preempted, or whose blocks were evicted in part. With a cache, blocks from before a
    # passage was deleted may be followed by later ones.
    settled = {name: each for name, each in asked.items() if each[0] in storm.sound or not caching}
    wrong = {n: s for n, s in settled.items() if s[1] not in (fused[s[0]], plain[s[0]], lacking.get(s[0]))}
    assert len(settled) > 100 and not wrong
    assert pool.get_num_free_blocks() == free
    kept = ("_plans", "_given_salts", "_loading", "_reports", "_by_label", "_prompts", "_missing")
    assert not {name: vars(side)[name] for name in kept if vars(side)[name]}


def test_fused_prompts_and_prompts_read_in_pieces_share_steps(serving, tmp_path):
    """128 tokens a step: fused prompts are loaded at once, the others beside them in pieces."""
    folder = tiny_models.save_model("llama", tmp_path / "model", is_endless=True, **SHAPE)
    server = serving(folder, tmp_path / "home", max_num_batched_tokens=128)
    server.engine.encode(LASTING, [f"p{n}" for n in range(len(LASTING))])
    orders = [[LASTING[n] for n in order] for order in ((0, 3, 1, 2, 6), (5, 1, 4, 2, 7))] * 2
    prompts = [server.prompt(order) for order in orders]
    ids = [list(prompt.token_ids) for prompt in prompts]
    assert min(map(len, ids)) > 2 * 128
    outputs = server.ask(ids, [None, {"off": True}, {"off": True}, None], logprobs=None)
    for prompt, output in zip(prompts, outputs, strict=True):
        method = "full" if output.kv_transfer_params is None else "probe-shift:sure=0"
        found = server.engine.generate(prompt, method=method, max_new_tokens=8)
        assert tuple(output.outputs[0].token_ids) == found.token_ids
    assert [output.kv_transfer_params is None for output in outputs] == [False, True, True, False]
