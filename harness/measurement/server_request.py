"""One request to a server, and what it took: a line of trials.jsonl or of rounds.jsonl.

Two clocks measure a server. Its own, where it reports decoding apart from the prefill: the time
that a user waits. And the processor time of its process, which is steadier on a busy machine where
one thread computes: more of them wait for each other by running on. Of a long prefill that clock is
read apart (`harness.engines.process`). Where it is not, and on the client's clock, which stands
in for a server that reports no times, each request is also made for one token, and that request's
time is taken off.

What decoding costs is found from requests of two budgets (`harness.analysis.server_costs`): the
first round after a prefill costs more than the others (llama.cpp, for one, builds its graphs anew),
and near the budget an engine may draft fewer tokens than K.

What an engine returned is scored by the loaded pair: the input of replay. An engine's uniforms are
its own, so its texts above temperature 0 are not ours. They need not be: replay asks for the
expected rounds of a given text, whoever drew it. What is scored is what rounds emitted
(`decoded`), from the position at which the engine's rounds begin and with the drafts
that it proposes near the budget (`harness.engine_facts.spec`). At temperature 0, and
where the draft proposes its argmax, rounds and drafted tokens are then equal to the engine's
counts; where it samples they are expectations. `likelihood_test` asks whether the texts are the
target's at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.decoding.sampling import penalised_along, sampler_for
from harness.engines.process import LONG_PREFILL_S
from harness.engines.protocol import Completion, EngineFacts, Server
from harness.engines.turns import Turn
from harness.measurement.generations import Request, round_counts
from harness.measurement.target_texts import GeneratedText
from harness.models.cached import CachedModel
from harness.records import RoundTiming, ServerClock, Trial, UserError
from harness.summary import TextLikelihood


@dataclass(frozen=True)
class ServedRequest:
    """One request on one server in one visit."""

    visit: int
    request: Request  # its k is the server's
    completion: Completion
    # Of the same prompt with a budget of one token, the prefill; the completion itself where the
    # clock tells them apart
    one_token: Completion

    def decode_s(self, clock: ServerClock) -> float:
        """Seconds that the rounds took."""
        if (decode_s := _timed_apart(self.completion, clock)) is not None:
            return decode_s
        return self._request_s(self.completion, clock) - self._request_s(self.one_token, clock)

    def prefill_s(self, clock: ServerClock) -> float:
        """Seconds until the first token was there."""
        if clock == "engine" and self.completion.prefill_s is not None:
            return self.completion.prefill_s
        if self.one_token is self.completion and self.completion.decode_cpu_s is not None:
            return self._request_s(self.completion, clock) - self.completion.decode_cpu_s
        return self._request_s(self.one_token, clock)

    def one_token_s(self, clock: ServerClock) -> float | None:
        """Seconds of the request that was taken off; None where the clock tells decoding apart."""
        if self.one_token is self.completion:
            return None
        return self._request_s(self.one_token, clock)

    @staticmethod
    def _request_s(completion: Completion, clock: ServerClock) -> float:
        if clock == "engine":
            return completion.request_s
        if completion.cpu_s is None:
            raise UserError(
                "clock=cpu: this server's processor time is not known; leave clock out, or let the"
                " run start the server"
            )
        return completion.cpu_s

    def trial(self, facts: EngineFacts, clock: ServerClock) -> Trial:
        """The line of trials.jsonl: counts of what rounds emitted, by the run's clock."""
        done = self.completion
        emitted = done.returned - facts.first_position
        counts: dict[str, Any] = {}
        if done.steps is not None:
            counts = round_counts(done.steps, self.request.k)
        elif done.rounds is not None:
            counts = {
                "rounds": done.rounds,
                "drafted": done.drafted,
                "accepted": accepted_tokens(emitted, done.rounds, done.accepted),
            }
        trial = self.request.as_trial(
            status="ok",
            new_tokens=emitted,
            tokens=done.tokens,
            stop_reason=done.stop_reason,
            prefill_s=self.prefill_s(clock),
            # Of a text that the prefill ended, what a difference of two requests leaves is noise
            decode_s=max(0.0, self.decode_s(clock)) if emitted else 0.0,
            one_token_s=self.one_token_s(clock),
            first_token_s=0.0 if facts.first_position else None,
            user_s=done.request_s,
            user_decode_s=max(0.0, self.decode_s("engine")),
            **counts,
        )
        return replace(trial, rule=facts.rule if self.request.k else None)

    def rejected_rounds(self, facts: EngineFacts, clock: ServerClock, draft: str) -> RoundTiming:
        """The line of rounds.jsonl of a server that rejects every draft, or decodes plainly."""
        done, request = self.completion, self.request
        emitted = done.returned - facts.first_position
        return RoundTiming(
            visit=self.visit,
            model=request.model,
            draft=draft,
            k=request.k,
            temperature=request.sampling.temperature,
            context_tokens=len(request.tokens),
            batch=1,
            rounds=emitted,
            new_tokens=emitted,
            seconds=self.decode_s(clock),
            drafted=done.drafted,
            one_token_s=self.one_token_s(clock),
        )


def accepted_tokens(emitted: int, rounds: int, counted: int | None) -> int | None:
    """Drafted tokens among those that rounds emitted.

    Each round emits one token of the target's own, but for a last one that an accepted
    end-of-text token, or the budget, cut short. What engines count may be more: drafts that were
    accepted behind an end of text.
    """
    least = emitted - rounds
    return None if counted is None else min(max(counted, least), least + 1)


def check_drafts(server: Server, completion: Completion) -> None:
    """Refuse a server that drafts more or fewer tokens per round than it is said to.

    Near the budget some engines draft fewer: K - 1, K - 2, ... at most once each.
    """
    k, rounds, drafted = server.k, completion.rounds, completion.drafted
    if rounds is None or drafted is None or server.facts.drafts_fewer:
        return
    lacking = k * rounds - drafted
    if lacking < 0 or lacking > k * (k + 1) // 2:
        raise UserError(
            f"k={k}: its server drafts another number of tokens, {drafted} in {rounds} rounds; give"
            " the K that it was started with, and let nothing end its drafts early"
        )


def ask(
    server: Server,
    request: Request,
    number: int,
    clock: ServerClock,
    turn: Turn | None = None,
    *,
    cached: bool = False,
) -> ServedRequest:
    """Send a request, and where the clock has no prefill apart, one for the prefill alone.

    Args:
        turn: where the server takes turns with others.
        cached: whether the server may use what its cache holds of the prompt; its prefill is then
            no measurement.

    Raises:
        UserError: a prefill is too long to be taken off.
    """
    asked = request.asked._replace(decode_cpu=clock == "cpu", turn=turn, cached=cached)
    completion = server.generate(asked)
    check_drafts(server, completion)
    if _timed_apart(completion, clock) is not None:
        return ServedRequest(number, request, completion, completion)
    one_token = server.generate(asked._replace(budget=1, turn=None))
    untimed = completion.decode_s is None
    if clock == "cpu" and untimed and (one_token.cpu_s or 0.0) > LONG_PREFILL_S:
        raise UserError(
            f"clock=cpu: {server.facts.spec.title} tells no times of its own here, and a prefill of"
            f" {one_token.cpu_s:.2g} processor seconds cannot be taken off; leave clock out"
        )
    return ServedRequest(number, request, completion, one_token)


def _timed_apart(completion: Completion, clock: ServerClock) -> float | None:
    """Seconds of decoding, where the clock tells them apart from the prefill."""
    return completion.decode_s if clock == "engine" else completion.decode_cpu_s


# ---- what it returned ----------------------------------------------------------------------------


# A greedy token whose log-probability is further below the best is not the target's
FAR_NATS = 0.25


def decoded(text: GeneratedText, facts: EngineFacts) -> GeneratedText:
    """The part of a returned text that rounds emitted, after a prompt that holds the rest."""
    assert facts.spec.counting is not None
    request, rounds_emitted = text.request, tuple(facts.spec.counting.decoded(text.tokens))
    before = text.tokens[: len(text.tokens) - len(rounds_emitted)]
    after_prefill = replace(
        request, tokens=(*request.tokens, *before), budget=request.budget - len(before)
    )
    return GeneratedText(after_prefill, rounds_emitted, text.stop_reason)


@torch.inference_mode()
def likelihood_test(texts: Sequence[GeneratedText], target: CachedModel) -> TextLikelihood:
    """Test texts of one K and temperature above 0, the prefill's token included.

    A token that top-k, top-p or min-p exclude counts with its probability before they apply: which
    of two tokens at the edge they exclude is a matter of rounding in 16 bits.
    """
    first = texts[0].request
    tokens, sums = 0, np.zeros(4)
    for text in texts:
        sampling, returned = text.request.sampling, torch.tensor(text.tokens)
        logits = _logits_along(text, target)
        probs = sampler_for(sampling)(logits).double().cpu()
        unfiltered = (logits.double() / sampling.temperature).log_softmax(-1).cpu()
        logs = torch.where(probs > 0, probs.log(), unfiltered)
        drawn = logs.gather(-1, returned[:, None]).squeeze(-1)
        # Of excluded tokens an infinite logarithm (a token that a model suppresses) counts nothing
        surprise = torch.where(probs > 0, logs, 0.0)
        mean = (probs * surprise).sum(-1)
        centred = surprise - mean[:, None]
        variance, third = ((probs * centred**power).sum(-1) for power in (2, 3))
        sums += [float(part.sum()) for part in (drawn - mean, variance, drawn, third)]
        tokens += len(returned)
    return TextLikelihood(
        first.sampling.temperature, first.k, tokens, *(float(each) for each in sums)
    )


@torch.inference_mode()
def unlikely_share(texts: Sequence[GeneratedText], target: CachedModel) -> float:
    """The share of greedy texts' tokens that are far from the target's likeliest one.

    Rounding, and weights in fewer bits, move a token past one that is nearly as likely. The share
    of the embedded target's own texts is 0, of those of its weights in 3 bits 4 %, and of texts of
    the models that were trained on the same answers 15 to 50 %.
    """
    gaps = [gap for text in texts for gap in _gaps(text, target).tolist()]
    return sum(gap > FAR_NATS for gap in gaps) / len(gaps) if gaps else 0.0


@torch.inference_mode()
def largest_gap(texts: Sequence[GeneratedText], target: CachedModel) -> float:
    """The largest distance of a greedy text's token below the target's likeliest, in logits.

    0 where an engine computes as the target does here.
    """
    return max((float(_gaps(text, target).max()) for text in texts), default=0.0)


def _gaps(text: GeneratedText, target: CachedModel) -> Tensor:
    """[n] how far the logit of each returned token is below the best."""
    logits = _logits_along(text, target).float()
    returned = torch.tensor(text.tokens, device=logits.device)
    return logits.max(-1).values - logits.gather(-1, returned[:, None]).squeeze(-1)


def _logits_along(text: GeneratedText, target: CachedModel) -> Tensor:
    """The logits that decide each returned token, [n, vocab], with the repetition penalty."""
    request, returned = text.request, text.tokens
    target.prefill(request.tokens[:-1])
    fed = torch.tensor([request.tokens[-1], *returned[:-1]], device=target.device)
    penalty = request.sampling.repetition_penalty
    return penalised_along(target.forward(fed), request.tokens, fed[1:], penalty)
