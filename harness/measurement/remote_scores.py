"""Texts of a server: completions with their token ids, and log-probabilities.

An audition needs the target's completions, and these need no weights of it here. They come from
whatever server has the target: llama.cpp's, SGLang's, or one with `/v1/completions` that returns
token ids (vLLM's, with `return_token_ids`). Text alone would not do, since text that is encoded
again may have other tokens.

Above temperature 0 the acceptance rules compare the target's probability of a token with the
draft's. Servers tell log-probabilities of the distribution before temperature, top-k or top-p
apply, and of a few tokens only. At temperature 1 without these that is the distribution that was
drawn from; at another temperature it cannot be had from a few tokens, so other temperatures are
refused (`refuse_sampling`). At temperature 0 a rule asks only whether a token is the draft's
likeliest; a plain server of the draft tells these (`asked_scores`).
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.decoding.sampling import SamplingParameters
from harness.engines.http_client import HttpClient, WantedModel
from harness.engines.http_server import Interface, served_model
from harness.engines.protocol import Asked, Completion, Likeliest, Server
from harness.engines.running import KINDS
from harness.measurement.confidences import confidence_of
from harness.measurement.draft_scores import Scores, trace_of
from harness.measurement.generations import Request, stop_reason
from harness.measurement.target_texts import GeneratedText
from harness.records import DraftConfidence, TextTrace, UserError

# Of an answer's text, what is compared with what its ids stand for
COMPARED_CHARACTERS = 40
# Tokens that a draft's server is asked for at a time where it leaves the text: a draft ends soon
ONWARDS = 3


def refuse_sampling(sampling: SamplingParameters) -> None:
    """Refuse texts whose log-probabilities a server cannot tell, as the module says."""
    if sampling.temperature not in (0.0, 1.0):
        raise UserError(
            f"texts_from: temperature={sampling.temperature:g}: a server tells log-probabilities"
            " before the temperature applies, and of a few tokens, which gives no others; use 0"
            " and 1"
        )
    if sampling.repetition_penalty not in (None, 1.0):
        raise UserError("texts_from: not with decode.repetition_penalty, which changes scores")
    for name in () if sampling.greedy else ("top_k", "top_p", "min_p"):
        if getattr(sampling, name) not in (None, 1.0 if name == "top_p" else 0):
            raise UserError(
                f"texts_from: not with decode.{name} at temperature 1: a server tells"
                " log-probabilities before it applies; leave it out, or use temperature=0"
            )


class TextServer:
    """A server with a model that completes prompts, returning token ids."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        timeout_factor: float = 1.0,
        wanted: WantedModel | None = None,
    ) -> None:
        self._client = HttpClient(
            url, key, "texts_from", timeout_factor=timeout_factor, wanted=wanted
        )
        self._kind = self._recognised()
        self.engine, self.version = self._kind.engine, self._kind.version_of(self._client)
        self._compared = False

    def complete(self, request: Request, decode: Callable[[Sequence[int]], str]) -> GeneratedText:
        """The target's completion of one prompt, with log-probabilities above temperature 0.

        Args:
            request: its seed is the run's; the server is sent one of the prompt's own, since equal
                ones would correlate the texts.
            decode: what ids stand for in the target's tokenizer, to know another model by.

        Raises:
            UserError: what the server refuses or cannot tell, it drafts, or it has another model.
        """
        wanted = not request.sampling.greedy
        answer, _ = self._client.repeated(lambda: self._ask(request, wanted))
        where = self._client.where
        if answer.truncated:
            raise UserError(f"{where}: its context is too small for prompt and new_tokens")
        if answer.k != 0 or self._kind.drafts(self._client):
            raise UserError(
                f"{where}: it drafts, and so its texts are those of the target and a draft, as far"
                " as it is lossless; give a server that decodes plainly"
            )
        if not answer.tokens:
            raise UserError(f"{where}: its answer has no token ids, which texts need")
        if wanted and len(answer.logprobs) != len(answer.tokens):
            raise UserError(
                f"{where}: {len(answer.logprobs)} log-probabilities of {len(answer.tokens)} tokens;"
                " a server that speculates may not tell them, use one that decodes plainly"
            )
        self._compare(answer.text or "", decode(answer.tokens))
        return GeneratedText(
            request,
            answer.tokens,
            stop_reason(answer.tokens, request.eos, request.stop),
            logprobs=tuple(map(float, answer.logprobs)) if wanted else None,
        )

    def _ask(self, request: Request, logprobs: bool) -> Completion:
        client, kind = self._client, self._kind
        seed = _seed(request)
        body = kind.body(request.asked._replace(seed=seed, logprobs=int(logprobs)))
        if kind.names_model:
            body["model"] = served_model(client)
        deadline_s = client.deadline_s(len(request.tokens), request.budget)
        answer = client.post(kind.path, body, deadline_s)
        try:
            return kind.parse(answer)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            name = type(error).__name__
            raise UserError(
                f"{client.where}: its answer cannot be read ({name}: {error})"
            ) from error

    def _compare(self, answer: str, decoded: str) -> None:
        """Refuse another model: the first answer with text is not what its ids stand for."""
        expected, returned = (text.strip()[:COMPARED_CHARACTERS] for text in (decoded, answer))
        if self._compared or not expected:
            return
        # The end of a character may be held back
        if not returned or not expected.startswith(returned.rstrip("�")[: len(expected)]):
            raise UserError(
                f"{self._client.where}: another model than model=, by its tokens: ids that stand"
                f" for {expected!r} are {returned!r} there"
            )
        self._compared = True

    def _recognised(self) -> Interface:
        for kind in KINDS:
            path, field = kind.probe
            if field in self._client.stated_or_empty(path):
                return kind
        raise UserError(
            f"{self._client.where}: neither llama.cpp's server nor SGLang's nor one with"
            " /v1/models; texts_from takes these"
        )


def _seed(request: Request) -> int:
    """A seed of 31 bits, of the run's seed and the text."""
    digest = hashlib.sha256(f"{request.seed} {request.key}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


# ---- scores of a draft that a server has ---------------------------------------------------------


def asked_scores(
    texts: Sequence[GeneratedText],
    draft: Server,
    *,
    draft_name: str,
    num_draft_tokens: int = 1,
    least: float | None = None,
    among: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> tuple[list[TextTrace], list[DraftConfidence]]:
    """Score texts by asking a plain server of the draft for its likeliest token at every position.

    Its kernels compute in the weights' own bits, token by token behind a cached prefix, as they do
    when they draft. So they decide near ties as the speculating server's do; a checkpoint in other
    bits does not (in 5 of 15 texts of a 0.5B draft in 4 bits).

    For a threshold it is asked for what `draft_confidences` computes, too: one request at each
    position of a text, of one token where the draft's is the text's, else of as many as a round may
    draft from there, off the text.

    Args:
        texts: of temperature 0; of others for a draft that proposes its likeliest token, where the
            target's probabilities are not asked for, and no confidences.
        least: no threshold below it is replayed; 0 is no threshold. None: without confidences.
        among: the number of likeliest tokens among which the engine takes a token's probability.

    Raises:
        ServerDiedError, RequestFailedError, RefusedError: it does not answer.
        UserError: it lists no log-probabilities.
    """
    traces: list[TextTrace] = []
    made: list[DraftConfidence] = []
    for text in texts:
        request, tokens = text.request, text.tokens
        asked = Asked((), SamplingParameters(0.0), 0, budget=1, logprobs=among, cached=True)
        if len(request.tokens) > 1:  # its last token is decoded alone, as a draft's first one
            draft.generate(asked._replace(prompt=tuple(request.tokens[:-1])))
        values = np.zeros((len(tokens) + 1, num_draft_tokens))
        best: list[int] = []
        for end, row in enumerate(values[:-1] if least is None else values):
            prefix = asked._replace(prompt=(*request.tokens, *tokens[:end]))
            done = draft.generate(prefix)
            best.append(done.tokens[0])
            if least is None:
                continue
            row[0] = _confidence(done.likeliest)
            leaves = end == len(tokens) or best[-1] != tokens[end]
            if leaves and not row[0] < least and num_draft_tokens > 1:
                more = prefix._replace(prompt=(*prefix.prompt, best[-1]))
                row[1:] = _onwards(draft, more, least, num_draft_tokens - 1)
        if least is not None and np.isnan(values[:, 0]).all():
            raise UserError(
                "p_min: the draft's server lists no log-probabilities, which a threshold is"
                " compared with; leave p_min out"
            )
        traces.append(_asked_trace(text, draft_name, best[: len(tokens)]))
        if least is not None:
            made.append(confidence_of(text, draft_name, values))
        tick()
    return traces, made


def _asked_trace(text: GeneratedText, draft_name: str, best: Sequence[int]) -> TextTrace:
    """The trace of a text, by the draft's likeliest token at each of its positions."""
    match, one = np.equal(best, text.tokens).astype(np.float64), np.ones(len(best))
    target = np.full(len(best), 0.0 if text.request.sampling.greedy else np.nan)
    with np.errstate(divide="ignore"):
        scores = Scores(target, np.log(match), match, one, one)
    return trace_of(text, draft_name, scores)


def _confidence(likeliest: Likeliest) -> float:
    """The probability of the likeliest of the listed first tokens; NaN where none is listed.

    llama.cpp lists none of a token that leaves a character incomplete.
    """
    if not likeliest or not likeliest[0]:
        return math.nan
    listed = np.exp([*likeliest[0].values()])
    return float(listed.max() / listed.sum())


def _onwards(draft: Server, asked: Asked, least: float, count: int) -> NDArray[np.float64]:
    """[count] confidences of what is drafted on, up to the first below `least`; 0 after it.

    A draft goes on after an end of text, at which an answer stops.
    """
    values, place = np.zeros(count), 0
    while place < count:
        done = draft.generate(asked._replace(budget=min(ONWARDS, count - place)))
        for index in range(len(done.tokens)):
            values[place] = _confidence(done.likeliest[index:])
            place += 1
            if values[place - 1] < least:
                return values
        asked = asked._replace(prompt=(*asked.prompt, *done.tokens))
    return values
