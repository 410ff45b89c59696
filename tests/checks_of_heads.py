"""What every kind of head must pass: lossless in the loop, and scored as the loop runs it.

The target is small and random; heads of each kind are made by the tests of that kind.
"""

import itertools
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import qwen3
from runs import EXACT_FLAGS, ran
from safetensors.torch import load_file, save_file
from stubs import CPU, GREEDY, REQUEST, FunctionModel, assert_counts, decoded, text_of
from test_verification import (
    VOCAB,
    cells,
    random_distribution,
    round_outcomes,
    sequence_probabilities,
)
from torch import Tensor

from harness.analysis import analyse
from harness.analysis.replayed import ScoredTexts, replayed, replayed_adaptively
from harness.cli import compose
from harness.config import DraftConf, ModelKeys
from harness.decoding.drafters import HeadDrafter, HeadModel
from harness.decoding.sampling import SamplingParameters, penalised, sampler_for
from harness.measurement.confidences import draft_confidences
from harness.measurement.draft_scores import score_with_head
from harness.measurement.generations import Request
from harness.measurement.target_texts import GeneratedText, generate_texts
from harness.models.cached import CachedModel
from harness.models.heads.base import Head
from harness.models.lean.model import LeanModel
from harness.models.load import LoadedModel
from harness.records import Rule, UserError
from harness.stats.jackknife import Array
from harness.theory.acceptance_rules import accept_probabilities
from harness.theory.replay import Replayed, replay
from tools.gguf_file import write_block_gguf

LAYERS, VOCABULARY = 7, 16
SAMPLED = SamplingParameters(1.0)
SAMPLINGS = (
    GREEDY,
    SamplingParameters(0.7, top_k=9, top_p=0.9, repetition_penalty=1.3),
    pytest.param(SAMPLED, marks=pytest.mark.exhaustive),
)
PROMPTS: tuple[tuple[int, ...], ...] = (
    (5, 9, 3, 2, 7, 5, 9),
    (8,),
    (3, 4),
    tuple(place * place % 13 for place in range(36)),
)


def random_target(**sizes: Any) -> LoadedModel:
    """A random target of 7 layers and 16 tokens; no test reads its tokenizer."""
    network = qwen3(1, **{"layers": LAYERS, "vocab": VOCABULARY, **sizes})
    return LoadedModel(ModelKeys("model"), "target", None, frozenset(), 256, network)


def keeping(target: LoadedModel, head: Head, forward: type[CachedModel] = LeanModel) -> CachedModel:
    """The target with a cache, which keeps the states that a head reads."""
    model = forward(target.network, target.vocab_size)
    model.keep_states(head.network.layers)
    return model


def asked(sampling: SamplingParameters, budget: int = 20) -> list[Request]:
    """A text after each of the prompts."""
    one = replace(REQUEST, sampling=sampling, budget=budget, seed=5, eos=frozenset({15}))
    return [replace(one, prompt=str(index), tokens=tokens) for index, tokens in enumerate(PROMPTS)]


# ---- the loop and replay -------------------------------------------------------------------------


def assert_replay_counts_the_loops_rounds(
    model: CachedModel,
    head: Head,
    ks: Sequence[int],
    rules: Iterable[Rule] = ("ratio",),
    budget: int = 20,
) -> Mapping[int, Replayed]:
    """At temperature 0 texts are the target's, and every count of every text and K replay's.

    Args:
        rules: the first at every K, the others at the largest alone.
        budget: of a text; enough for a random head to be accepted once.

    Returns:
        What replay expects, by K, under the last rule.
    """
    requests, every_k = asked(GREEDY, budget), ks
    texts = generate_texts(model, requests, name="model=target")
    traces = score_with_head(texts, model, head, num_draft_tokens=max(ks), draft_name="head")
    by_k: Mapping[int, Replayed] = {}
    for rule in rules:
        by_k = replayed(traces, rule, every_k)
        for k, (row, request) in itertools.product(ks, enumerate(requests)):
            drafting = replace(request, k=k, rule=rule).generation(CPU)
            rounds = decoded(model, HeadDrafter(head, model, GREEDY, rule), drafting)
            assert text_of(rounds) == list(texts[row].tokens)
            assert_counts(by_k[k], row, rounds)
        ks = (max(ks),)
    assert by_k[max(ks)].accepted.sum() > 0
    return by_k


def gaps(
    requests: Sequence[Request], model: CachedModel, head: Head, threshold: float = 0.0
) -> Array:
    """[2, texts] rounds and drafted tokens of the loop, less those that replay expects.

    No more tokens are drafted after one that is less likely than the threshold.
    """
    rounds = [
        decoded(
            model,
            HeadDrafter(head, model, each.sampling, each.rule, threshold),
            each.generation(CPU),
        )
        for each in requests
    ]
    texts = [
        GeneratedText(replace(each, k=0), tuple(text_of(done)), "budget")
        for each, done in zip(requests, rounds, strict=True)
    ]
    k = max(each.k for each in requests)
    traces = score_with_head(texts, model, head, num_draft_tokens=k, draft_name="head")
    if threshold:
        known = draft_confidences(
            texts, model, head, draft_name="head", rule="ratio", num_draft_tokens=k, least=0.1
        )
        scored = ScoredTexts(traces, {each.key: each for each in known}, "ratio")
        expected = replayed_adaptively(scored, k, threshold)
    else:
        expected = replayed(traces, "ratio", [k])[k]
    drafted = [sum(each.drafted for each in done) for done in rounds]
    return np.array([[*map(len, rounds)] - expected.rounds, drafted - expected.drafted])


def gap_in_standard_errors(model: CachedModel, head: Head, generations: int) -> float:
    """Of the loop's rounds at K = 3 and temperature 1 from those expected of its very texts."""
    requests = [
        replace(one, repetition=repetition, k=3)
        for repetition in range(generations // len(PROMPTS))
        for one in asked(SAMPLED, 12)
    ]
    rounds, _ = gaps(requests, model, head)
    return float(rounds.sum() / np.sqrt(np.square(rounds).sum()))


def step_by_step(
    head: Head, model: CachedModel, text: GeneratedText, start: int, depth: int
) -> Tensor:
    """Logits of the head in a round from a start whose drafts are the text's tokens."""
    before = [*text.request.tokens, *text.tokens[:start]]
    drafter = HeadDrafter(head, model, GREEDY)
    model.prefill(before[:-1])
    drafter.begin(before)
    return drafter.logits_along(torch.tensor(text.tokens[start : start + depth]))


def assert_scores_are_the_loops(
    model: CachedModel, head: Head, sampling: SamplingParameters, depth: int
) -> None:
    """From every start, for as many tokens as a head drafts, `depth` at most."""
    most = head.drafts or depth
    texts = generate_texts(model, asked(sampling, 12), name="model=target")
    traces = score_with_head(texts, model, head, num_draft_tokens=depth, draft_name="head", chunk=5)
    for text, trace in zip(texts, traces, strict=True):
        first = int(len(text.request.tokens) == 1)  # nothing precedes the first token's state
        for start in range(first, len(text.tokens)):
            logits = step_by_step(head, model, text, start, min(depth, most))
            for offset, row in enumerate(logits):
                at = start + offset
                seen = torch.zeros(1, VOCABULARY, dtype=torch.bool)
                seen[0, [*text.request.tokens, *text.tokens[:at]]] = True
                drafted = penalised(row[None], seen, sampling.repetition_penalty)
                token = text.tokens[at]
                assert trace.draft_is_argmax[start, offset] == (int(drafted.argmax()) == token)
                if sampling.greedy:
                    continue
                chance = float(sampler_for(sampling)(drafted)[0, token])
                assert np.exp(trace.draft_logprob[start, offset]) == pytest.approx(
                    chance, abs=1e-5, rel=1e-3
                )
        if first or head.drafts:
            assert trace.proposed is not None
            expected = [0] * first + [most] * (len(text.tokens) - first)
            assert trace.proposed.tolist() == expected
        beyond = np.isnan(trace.draft_logprob)
        assert beyond[-1].tolist() == [False] + [True] * (beyond.shape[1] - 1)


class HeadContract:
    """What a kind of head must pass; its module has the fixtures `target` and `head`.

    Attributes:
        ks: where replay counts the loop's rounds.
        rules: acceptance rules of that, the later ones at the largest K.
        budget: of a text; enough for a random head to be accepted once.
        least: the least share of drafted tokens that are accepted at the largest K.
        depth: tokens that are scored from every start.
        many: generations of the comparison at temperature 1 in make test-all.
    """

    ks: tuple[int, ...] = (1, 3)
    rules: tuple[Rule, ...] = ("ratio",)
    budget = 20
    least = 0.0
    depth = 3
    many = 5000

    def test_the_greedy_text_is_the_targets_and_replay_counts_its_rounds(
        self, target: LoadedModel, head: Head
    ) -> None:
        counts = assert_replay_counts_the_loops_rounds(
            keeping(target, head), head, self.ks, self.rules, self.budget
        )
        assert counts[max(self.ks)].acceptance_rate > self.least

    @pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
    def test_scores_are_those_of_the_loops_own_rounds_from_every_start(
        self, target: LoadedModel, head: Head, sampling: SamplingParameters
    ) -> None:
        assert_scores_are_the_loops(keeping(target, head), head, sampling, self.depth)

    @pytest.mark.parametrize("generations", [24, pytest.param(0, marks=pytest.mark.exhaustive)])
    def test_rounds_at_temperature_1_are_those_that_replay_expects(
        self, target: LoadedModel, head: Head, generations: int
    ) -> None:
        gap = gap_in_standard_errors(keeping(target, head), head, generations or self.many)
        assert abs(gap) < 3


class FolderContract(HeadContract):
    """The same of a kind whose module has `folders`, a checkpoint of each layout.

    Attributes:
        kinds: the kind that each layout is of.
        refusals: a layout, entries of its config.json, and what the refusal says of them.
    """

    kinds: Mapping[str, str]
    refusals: Sequence[tuple[str, dict[str, Any], str]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "change" in metafunc.fixturenames:
            metafunc.parametrize(("layout", "change", "says"), self.refusals)
        elif "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", self.kinds)

    def test_a_head_that_is_not_understood_is_refused_with_what_was_found(
        self,
        target: LoadedModel,
        folders: dict[str, Path],
        tmp_path: Path,
        layout: str,
        change: dict[str, Any],
        says: str,
    ) -> None:
        kind = self.kinds[layout]
        assert re.search(says, assert_refused(folders[layout], kind, target, tmp_path, **change))

    def test_a_head_in_shards_or_in_a_file_of_another_name_is_read(
        self, target: LoadedModel, folders: dict[str, Path], tmp_path: Path, layout: str
    ) -> None:
        assert_read_as_stored_otherwise(folders[layout], self.kinds[layout], target, tmp_path)


def assert_refused(folder: Path, kind: str, target: LoadedModel, root: Path, **change: Any) -> str:
    """Why a head with these entries in its config.json, or without those that are None, is."""
    shutil.copytree(folder, root, dirs_exist_ok=True)
    file = root / "config.json"
    changed = {**json.loads(file.read_text()), **change}
    kept = {name: value for name, value in changed.items() if value is not None}
    file.write_text(json.dumps(kept))
    conf = DraftConf(name="head", kind=kind, id=str(root))
    with pytest.raises(UserError) as refused:
        conf.spec.load(conf, target)
    return str(refused.value)


def stored_otherwise(folder: Path, root: Path, how: str) -> Path:
    """A copy of a head whose one file of weights is stored in another way."""
    copied = Path(shutil.copytree(folder, root / how))
    (file,) = copied.glob("*.safetensors")
    tensors = load_file(file)
    file.unlink()
    if how == "another name":
        save_file(tensors, copied / "head_of_target.safetensors", {"format": "pt"})
        return copied
    stem = "draft" if how == "shards of another name" else file.name.removesuffix(".safetensors")
    shards = {name: f"{stem}-0000{1 + len(name) % 2}-of-00002.safetensors" for name in tensors}
    for shard in {*shards.values()}:
        part = {name: tensor for name, tensor in tensors.items() if shards[name] == shard}
        save_file(part, copied / shard, {"format": "pt"})
    if how != "shards without an index":
        index = {"metadata": {}, "weight_map": shards}
        (copied / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return copied


STORED = ("shards", "another name", "shards of another name", "shards without an index")


def assert_read_as_stored_otherwise(
    folder: Path, kind: str, target: LoadedModel, root: Path, ways: Sequence[str] = STORED
) -> None:
    """Its weights are the same in every way, and so are its rounds."""

    def weights(path: Path) -> list[Tensor]:
        conf = DraftConf(name="head", kind=kind, id=str(path))
        return conf.spec.load(conf, target).network.weights

    expected = weights(folder)
    for how in ways:
        for one, other in zip(weights(stored_otherwise(folder, root, how)), expected, strict=True):
            assert torch.equal(one, other), how


# ---- all that a toy head and the production drafter can do ---------------------------------------

LENGTH = 4
Tokens = tuple[int, ...]
# (text to a start, what is drafted since) -> the distribution of the next draft
DraftedFrom = Callable[[Tokens, Tokens], Tensor]


class CountingTarget(FunctionModel):
    """A toy target whose state after a token is a number of its own for every text."""

    states: Tensor | None = None

    def prefill(self, tokens: Sequence[int]) -> None:
        super().prefill(tokens)
        self.states = self.numbers(len(tokens))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        self.states = self.numbers(len(tokens))
        return logits

    def numbers(self, count: int) -> Tensor:
        """The states [n, 1] of the last `count` tokens."""
        ends = range(len(self.cache) - count + 1, len(self.cache) + 1)
        return torch.tensor([[number_of(self.cache[:end])] for end in ends], dtype=torch.float64)


def number_of(text: Sequence[int]) -> int:
    return sum((token + 1) * 4**place for place, token in enumerate(text))


def proposals_from(
    before: Tokens,
    k: int,
    rule: Rule,
    make_head: Callable[[], HeadModel],
    drafted_from: DraftedFrom,
) -> dict[Tokens, float]:
    """What the production drafter proposes from a start and how often."""
    target = CountingTarget(random_distribution(1))
    # A draft that proposes its argmax reads no uniform; two of each would show that it does
    grids = [
        cells([0.5])
        if rule == "greedy_draft"
        else cells(
            value
            for drafted in itertools.product(range(VOCAB), repeat=index)
            for value in drafted_from(before, drafted).cumsum(0).tolist()
        )
        for index in range(k)
    ]
    chances: dict[Tokens, float] = defaultdict(float)
    for combination in itertools.product(*grids):
        target.prefill(before[:-1])
        drafter = HeadDrafter(make_head(), target, SAMPLED, rule)
        drafter.begin(before)
        uniforms = torch.tensor([middle for middle, _ in combination], dtype=torch.float64)
        tokens = tuple(drafter.propose(k, uniforms).tokens.tolist())
        chances[tokens] += float(np.prod([size for _, size in combination]))
    return chances


def enumerate_all(
    make_head: Callable[[], HeadModel], drafted_from: DraftedFrom, rule: Rule, k: int
) -> None:
    """Check, of all that the production drafter and verification can do, what they emit."""
    target, prompt = random_distribution(1), (2, 0)
    emitted: dict[Tokens, float] = defaultdict(float)
    reached: dict[Tokens, float] = {(): 1.0}
    rounds = 0.0
    while reached:
        text = min(reached, key=len)
        weight = reached.pop(text)
        rounds += weight
        after = (*prompt[1:], *text)
        proposals = proposals_from((*prompt, *text), k, rule, make_head, drafted_from)
        for drafted, share in proposals.items():
            target_rows = torch.stack([target((*after, *drafted[:i])) for i in range(k + 1)])
            rows = [drafted_from((*prompt, *text), drafted[:i]) for i in range(k)]
            ends = round_outcomes(target_rows, torch.stack(rows), drafted, rule)
            for (accepted, token), chance in ends.items():
                longer = (*text, *drafted[:accepted], token)[:LENGTH]
                into = emitted if len(longer) == LENGTH else reached
                into[longer] = into.get(longer, 0.0) + weight * share * chance
    texts = sequence_probabilities(lambda tokens: target((*prompt[1:], *tokens)), LENGTH)
    for text, chance in texts.items():
        assert emitted[text] == pytest.approx(chance, abs=1e-12)
    scores = np.zeros((3, len(texts), LENGTH, k))
    for row, text in enumerate(texts):
        for start, offset in itertools.product(range(LENGTH), range(k)):
            if start + offset >= LENGTH:
                continue
            token, before = text[start + offset], text[: start + offset]
            draft = drafted_from((*prompt, *text[:start]), text[start : start + offset])
            scores[:, row, start, offset] = (
                float(target((*prompt[1:], *before))[token].log()),
                float(draft[token].log()),
                int(draft.argmax()) == token,
            )
    accept = accept_probabilities(rule, *scores)
    expected = replay(accept, [LENGTH] * len(texts), [k])[k].rounds
    assert np.array(list(texts.values())) @ expected == pytest.approx(rounds, abs=1e-12)


def assert_llamacpp_drafts_as_replayed(tiny: LoadedModel, root: Path, *draft: str) -> int:
    """Run a server with a converted draft, K = 4; returns how many of its tokens are accepted."""
    conf = compose("server", draft).draft
    file = write_block_gguf(conf.spec.load(conf, tiny), tiny, root / "draft.gguf")
    words = (*draft, f"draft.gguf={file}")
    run = ran(
        *("server", root, "engine=llamacpp", *words, "k=[4]", "temperature=0", "repetitions=1"),
        *("prompts.limit=2", "new_tokens=24", "threads=1"),
        EXACT_FLAGS,
    )
    served = analyse(run).served
    assert served is not None
    (gate,) = served.gates
    assert gate.equal_rounds == gate.equal_drafted == gate.equal_texts == gate.texts == 4
    return sum(trial.accepted or 0 for trial in run.trials)
