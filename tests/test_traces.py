"""The target's texts and their scores: the loop's own texts and rounds, in bounded memory."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import hybrid, qwen3, sliding, small
from served_pair import embedded, shipped_requests
from stubs import CPU, GREEDY, decoded, text_of
from transformers import Gemma2Config, PreTrainedModel, RobertaConfig

from harness.analysis.replayed import replayed
from harness.decoding.drafters import ModelDrafter
from harness.decoding.lookups import NgramDrafter
from harness.decoding.protocols import Drafter
from harness.decoding.sampling import SamplingParameters, sampler_for
from harness.measurement import draft_scores
from harness.measurement.draft_scores import lookup_traces, score_texts
from harness.measurement.target_texts import (
    BrokenLogitsError,
    GeneratedText,
    Request,
    generate_texts,
)
from harness.models.cached import (
    CACHE_ARGUMENTS,
    CachedModel,
    SnapshotModel,
    SplitNetwork,
    split_network,
)
from harness.records import TextTrace, UserError
from harness.storage import RunFolder, load_traces

DRAFTS = ("tiny_good", "tiny_small", "tiny_unrelated")
BUDGET = 16
SAMPLED = SamplingParameters(1.0)
Make = Callable[[Request], Drafter]


def cached(name: str) -> CachedModel:
    return CachedModel(embedded(name).network, 1024)


@pytest.fixture(scope="module")
def target() -> CachedModel:
    return cached("tiny")


@pytest.fixture(scope="module")
def drafts() -> dict[str, CachedModel]:
    return {name: cached(name) for name in DRAFTS}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Four prompts of each shipped set, greedy."""
    return shipped_requests(embedded("tiny"), 4, budget=BUDGET, seed=3)


def plain(target: CachedModel, request: Request) -> tuple[int, ...]:
    return tuple(text_of(decoded(target, None, request.generation(CPU))))


def loop_rounds(target: CachedModel, drafter: Drafter, request: Request, k: int) -> list[int]:
    """Tokens emitted by each round of the real loop."""
    drafting = replace(request, k=k).generation(CPU)
    return [len(entry.tokens) for entry in decoded(target, drafter, drafting)]


def at(requests: Sequence[Request], sampling: SamplingParameters) -> list[Request]:
    return [replace(request, sampling=sampling) for request in requests]


# Texts


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(SAMPLED, marks=pytest.mark.exhaustive), SamplingParameters(0.8, 20, 0.9)],
    ids=str,
)
def test_batched_texts_are_plain_decodings(
    target: CachedModel, requests: list[Request], sampling: SamplingParameters
) -> None:
    asked = [*at(requests, sampling), *requests[:3]]
    assert len({len(request.tokens) for request in asked}) > 3
    texts = generate_texts(target, asked, name="model=tiny", batch=5)
    assert [text.request for text in texts] == asked
    assert [text.tokens for text in texts] == [plain(target, request) for request in asked]
    other = generate_texts(target, asked[::-1], name="model=tiny", batch=3)[::-1]
    assert [text.tokens for text in texts] == [text.tokens for text in other]


def test_progress_is_by_token_and_ends_at_the_budgets(
    target: CachedModel, requests: list[Request]
) -> None:
    """A batch of texts takes minutes on a processor; what a text leaves of its budget counts."""
    uninterrupted = generate_texts(target, requests[:4], name="model=tiny")
    eos = frozenset({uninterrupted[0].tokens[5]})
    asked = [replace(request, eos=eos) for request in requests[:4]]
    counts: list[int] = []
    generate_texts(target, asked, name="model=tiny", batch=2, tick=counts.append)
    assert sum(counts) == 4 * BUDGET
    assert len(counts) >= BUDGET


def test_an_end_token_ends_a_row_and_the_others_go_on(
    target: CachedModel, requests: list[Request]
) -> None:
    uninterrupted = generate_texts(target, requests, name="model=tiny")
    eos = frozenset({uninterrupted[0].tokens[5], uninterrupted[4].tokens[9]})
    asked = [replace(request, eos=eos, budget=BUDGET - i) for i, request in enumerate(requests)]
    texts = generate_texts(target, asked, name="model=tiny")
    assert {text.stop_reason for text in texts} == {"eos", "budget"}
    for text in texts:
        assert text.tokens == plain(target, text.request)
        assert eos.isdisjoint(text.tokens[:-1])
        assert (text.tokens[-1] in eos) == (text.stop_reason == "eos")
        assert text.hidden is not None
        assert len(text.hidden) == len(text.tokens) <= text.request.budget


class Small(CachedModel):
    """A model on a device with memory for `rows` rows."""

    rows = 2

    @property
    def network(self) -> Any:
        return self._network

    @network.setter
    def network(self, network: Any) -> None:
        self._network = network
        self.refused = 0

        def before(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
            # One row without a cache is the comparison of split_network
            free = 0 if any(inputs.get(name) is not None for name in CACHE_ARGUMENTS) else 1
            if inputs["input_ids"].shape[0] > max(self.rows, free):
                self.refused += 1
                raise torch.OutOfMemoryError("out of memory")

        network.base_model.register_forward_pre_hook(before, with_kwargs=True)


def test_running_out_of_memory_halves_the_batch_and_goes_on(
    target: CachedModel, requests: list[Request]
) -> None:
    small = Small(embedded("tiny").network, 1024)
    texts = generate_texts(small, requests, name="model=tiny", batch=9)
    assert small.refused == 2  # 9, 4, and from then on 2
    expected = generate_texts(target, requests, name="model=tiny")
    assert [text.tokens for text in texts] == [text.tokens for text in expected]
    scored = score_texts(texts, small, small, draft_name="self", batch=4)
    assert small.refused == 3
    assert all(trace.draft_is_argmax.all() for trace in scored)
    small.rows = 0
    with pytest.raises(UserError, match="model=tiny: out of memory with a single text"):
        generate_texts(small, requests[:2], name="model=tiny")


def first_new(text: GeneratedText) -> int:
    """Index of the first token that the prompt does not hold."""
    prompt = text.request.tokens
    return next(index for index, token in enumerate(text.tokens) if token not in prompt)


def spoiled(network: Any, token: int) -> CachedModel:
    """The model that is NaN from where it has read one token."""

    def after(_module: Any, _args: Any, inputs: dict[str, Any], output: Any) -> Any:
        read = (inputs["input_ids"] == token).cumsum(-1) > 0
        states = output.last_hidden_state
        output.last_hidden_state = states.masked_fill(read.unsqueeze(-1), float("nan"))
        return output

    network.base_model.register_forward_hook(after, with_kwargs=True)
    return CachedModel(network, 1024)


def test_nan_logits_name_the_model_the_prompt_and_the_position(requests: list[Request]) -> None:
    request = replace(requests[0], sampling=SAMPLED, eos=frozenset())
    name = f"prompt {request.prompt_set}/{request.prompt}"
    good = CachedModel(qwen3(), 1024)
    (text,) = generate_texts(good, [request], name="model=good")
    place = first_new(text)
    bad = spoiled(qwen3(), text.tokens[place])
    where = f"not finite at position {place + 1} of {name}"
    with pytest.raises(BrokenLogitsError, match=f"model=bad: .*{where}"):
        generate_texts(bad, [request], name="model=bad")
    with pytest.raises(BrokenLogitsError, match=f"draft=bad: .*{where}"):
        score_texts([text], good, bad, draft_name="bad", draft_shown="draft=bad")
    again = [replace(text, hidden=None)]
    with pytest.raises(BrokenLogitsError, match=f"model=bad: .*{where}"):
        score_texts(again, bad, good, draft_name="good", target_shown="model=bad")


def test_a_model_that_cannot_be_taken_apart_is_generated_and_scored_whole(
    requests: list[Request], drafts: dict[str, CachedModel]
) -> None:
    network = small(Gemma2Config, vocab_size=1024, final_logit_softcapping=2.0)
    capped = CachedModel(network, 1024)
    assert split_network(capped, [5, 6, 7]) is None
    asked = [*at(requests[:2], SAMPLED), *requests[:2]]
    texts = generate_texts(capped, asked, name="model=capped")
    assert [text.tokens for text in texts] == [plain(capped, request) for request in asked]
    assert all(text.hidden is None for text in texts)
    scored = score_texts(texts, capped, drafts["tiny_good"], draft_name="d", chunk=5)
    for trace, text in zip(scored, texts, strict=True):
        assert_scored(trace, text, capped, drafts["tiny_good"], 1024)


def test_padding_that_would_shift_positions_is_not_used(requests: list[Request]) -> None:
    sizes = {"pad_token_id": 127, "is_decoder": True, "initializer_range": 0.3}
    model = CachedModel(small(RobertaConfig, **sizes), 120)
    asked = [
        replace(requests[0], tokens=tuple(range(3, 3 + length)), eos=frozenset())
        for length in (12, 5, 12, 9)
    ]
    texts = generate_texts(model, asked, name="model=roberta")
    assert [text.tokens for text in texts] == [plain(model, request) for request in asked]
    batches = model.describe()["text_batches"]
    assert batches["generation"].startswith("equal lengths: padded is off by ")
    for trace, text in zip(score_texts(texts, model, model, draft_name="self"), texts, strict=True):
        assert_scored(trace, text, model, model, 120)


def test_a_model_that_no_batch_suits_is_generated_and_scored_alone(requests: list[Request]) -> None:
    network: Any = qwen3()

    def confused(_module: Any, _args: Any, inputs: dict[str, Any], output: Any) -> Any:
        if inputs["input_ids"].shape[0] > 1:
            output.last_hidden_state = output.last_hidden_state.flip(-1)
        return output

    network.base_model.register_forward_hook(confused, with_kwargs=True)
    model = CachedModel(network, 1024)
    asked = [*requests[:3], *at(requests[:1], SAMPLED)]
    texts = generate_texts(model, asked, name="model=x")
    assert [text.tokens for text in texts] == [plain(model, request) for request in asked]
    traces = score_texts(texts, model, model, draft_name="self")
    for trace, text in zip(traces, texts, strict=True):
        assert_scored(trace, text, model, model, 1024)
    batches = model.describe()["text_batches"]
    assert batches["generation"].startswith("one by one: padded is off by")
    assert batches["scoring"].startswith("one by one: padded is off by")


@pytest.mark.parametrize(("kind", "build"), [(CachedModel, sliding), (SnapshotModel, hybrid)])
def test_other_kinds_of_cache_give_plain_decodings_and_the_defined_scores(
    kind: type[CachedModel],
    build: Callable[[], PreTrainedModel],
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = kind(build(), 128)
    prompts = [tuple(range(3, 3 + length)) for length in (12, 5, 12, 9, 1)]
    (sampled,) = at(requests[:1], SAMPLED)
    asked = [
        replace(sampled, tokens=tokens, repetition=index, budget=8 + index)
        for index, tokens in enumerate(prompts)
    ]
    texts = generate_texts(model, asked, name="model=other")
    assert [text.tokens for text in texts] == [plain(model, request) for request in asked]
    monkeypatch.setattr(draft_scores, "PREFILL_POSITIONS", 24)
    again = [replace(text, hidden=None) for text in texts]
    traces = score_texts(again, model, model, draft_name="self", chunk=6)
    for trace, text in zip(traces, texts, strict=True):
        assert_scored(trace, text, model, model, 128)


# Scores


def fresh_logits(model: CachedModel, text: GeneratedText, width: int) -> torch.Tensor:
    """Logits behind each token of the text from one fresh forward, [n, width]."""
    ids = torch.tensor([[*text.request.tokens, *text.tokens[:-1]]])
    with torch.inference_mode():
        return model.network(ids).logits[0, len(text.request.tokens) - 1 :, :width]


def assert_scored(
    trace: TextTrace, text: GeneratedText, target: CachedModel, draft: CachedModel, width: int
) -> None:
    """The trace's numbers are what the definitions give on fresh forwards."""
    tokens = torch.tensor(text.tokens)
    target_logits, draft_logits = (fresh_logits(model, text, width) for model in (target, draft))
    best = draft_logits.argmax(-1)
    rows = torch.arange(len(tokens))
    sampling = text.request.sampling
    if sampling.greedy:
        p = torch.nn.functional.one_hot(tokens, width).double()
        q = torch.nn.functional.one_hot(best, width).double()
    else:
        p = sampler_for(sampling)(target_logits).double()
        of_draft = replace(sampling, temperature=trace.draft_temperature)
        q = sampler_for(of_draft)(draft_logits).double()
    expected = {
        "target_logprob": p[rows, tokens].log(),
        "draft_logprob": q[rows, tokens].log(),
        "draft_is_argmax": (best == tokens).double(),
    }
    assert trace.tokens.tolist() == list(text.tokens)
    for name, values in expected.items():
        scores = getattr(trace, name).astype(float)
        np.testing.assert_allclose(scores, values.numpy(), atol=3e-5, rtol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParameters(0.7, top_k=12, top_p=0.9)],
    ids=str,
)
def test_scores_are_what_their_definitions_say(
    target: CachedModel,
    drafts: dict[str, CachedModel],
    requests: list[Request],
    sampling: SamplingParameters,
) -> None:
    texts = generate_texts(target, at(requests[:5], sampling), name="model=tiny")
    traces = score_texts(texts, target, drafts["tiny_small"], draft_name="tiny_small", chunk=7)
    for trace, text in zip(traces, texts, strict=True):
        assert (trace.draft, trace.prompt) == ("tiny_small", text.request.prompt)
        assert trace.draft_temperature == sampling.temperature
        assert_scored(trace, text, target, drafts["tiny_small"], 1024)


def test_chunks_batches_pieces_and_stored_states_do_not_change_a_score(
    target: CachedModel,
    drafts: dict[str, CachedModel],
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = generate_texts(target, at(requests, SAMPLED), name="model=tiny")
    draft = drafts["tiny_good"]
    at_once = score_texts(texts, target, draft, draft_name="d", chunk=10_000)
    again = [replace(text, hidden=None) for text in texts]
    monkeypatch.setattr(draft_scores, "PREFILL_POSITIONS", 40)
    pieces = score_texts(again, target, draft, draft_name="d", chunk=11, batch=4)
    for one, other in zip(at_once, pieces, strict=True):
        for name in ("target_logprob", "draft_logprob"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=2e-4)


def test_logits_are_cut_to_the_narrower_vocabulary(
    target: CachedModel, drafts: dict[str, CachedModel], requests: list[Request]
) -> None:
    narrow = CachedModel(target.network, 1000)
    texts = generate_texts(narrow, at(requests[:3], SAMPLED), name="model=tiny")
    for draft in (CachedModel(drafts["tiny_good"].network, 990), drafts["tiny_good"]):
        scored = score_texts(texts, narrow, draft, draft_name="d")
        for trace, text in zip(scored, texts, strict=True):
            assert_scored(trace, text, narrow, draft, min(1000, draft.vocab_size))


def test_a_long_text_never_has_all_its_logits_at_once(
    drafts: dict[str, CachedModel], requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = drafts["tiny_small"]
    request = replace(requests[0], budget=400, eos=frozenset(), sampling=SAMPLED)
    texts = generate_texts(draft, [request, replace(request, repetition=1)], name="model=t")
    sizes: list[int] = []
    logits = SplitNetwork.logits

    def seen(self: SplitNetwork, hidden: torch.Tensor) -> torch.Tensor:
        made = logits(self, hidden)
        sizes.append(made.numel() // made.shape[-1])
        return made

    monkeypatch.setattr(SplitNetwork, "logits", seen)
    score_texts(texts, draft, draft, draft_name="d", chunk=64)
    assert sum(sizes) >= 2 * 800
    assert max(sizes) <= 64


# Replay against the loop


def factories(drafts: dict[str, CachedModel]) -> dict[str, Make]:
    def of(model: CachedModel) -> Make:
        return lambda request: ModelDrafter(model, request.sampling)

    made: dict[str, Make] = {name: of(model) for name, model in drafts.items()}
    return {**made, "ngram": lambda request: NgramDrafter(request.eos)}


@pytest.mark.parametrize(
    ("stride", "ks"),
    [(4, (4,)), pytest.param(1, (1, 2, 4, 8, 16), marks=pytest.mark.exhaustive)],
)
def test_greedy_replay_equals_the_loop_for_every_prompt_draft_and_k(
    target: CachedModel,
    drafts: dict[str, CachedModel],
    requests: list[Request],
    stride: int,
    ks: tuple[int, ...],
) -> None:
    requests = requests[::stride]
    texts = generate_texts(target, requests, name="model=tiny")
    for name, make in factories(drafts).items():
        if name == "ngram":
            traces = lookup_traces(texts, "ngram", num_draft_tokens=16, draft_name=name)
        else:
            traces = score_texts(texts, target, drafts[name], draft_name=name)
        by_k = replayed(traces, "ratio", ks)
        for row, request in enumerate(requests):
            for k in ks:
                rounds = loop_rounds(target, make(request), request, k)
                assert by_k[k].rounds[row] == len(rounds), (name, request.prompt, k)
                assert sum(rounds) == len(texts[row].tokens)


def assert_same(one: TextTrace, other: TextTrace) -> None:
    for field in fields(TextTrace):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            np.testing.assert_array_equal(left, right, err_msg=field.name)
        else:
            assert left == right, field.name
            assert type(left) is type(right), field.name


def test_traces_come_back_as_they_were(
    target: CachedModel, drafts: dict[str, CachedModel], requests: list[Request], tmp_path: Path
) -> None:
    (other,) = at(requests[:1], SamplingParameters(0.6, None, 0.8))
    asked = [
        *requests[:2],
        *at(requests[:2], SamplingParameters(1.0, top_k=5)),
        replace(other, category=None, repetition=1, budget=1),
    ]
    texts = generate_texts(target, asked, name="model=tiny")
    traces = [
        *score_texts(texts, target, drafts["tiny_good"], draft_name="tiny_good"),
        *lookup_traces(texts, "ngram", num_draft_tokens=5, draft_name="ngram"),
        *score_texts(texts, target, drafts["tiny_small"], draft_name="tiny_small"),
    ]
    # As ids of a vocabulary of 150,000 are
    traces[-1] = replace(traces[-1], tokens=traces[-1].tokens + 150_000)
    folder = RunFolder.create(tmp_path, "audition", ["tiny"], {})
    folder.write_traces(traces)
    back = load_traces(folder.path)
    assert len(back) == len(traces) == 15
    for one, other in zip(traces, back, strict=True):
        assert_same(one, other)
    assert any(trace.chosen and trace.draft_is_argmax.any() for trace in back)
    assert [path.name for path in folder.path.glob(".*")] == []


def test_a_run_without_traces_has_none_and_a_broken_file_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "audition", ["tiny"], {})
    assert load_traces(folder.path) == []
    folder.write_traces([])
    assert load_traces(folder.path) == []
    (folder.path / "traces.parquet").write_bytes(b"not a table")
    with pytest.raises(UserError, match=r"traces\.parquet: cannot be read"):
        load_traces(folder.path)
