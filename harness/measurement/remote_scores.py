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
likeliest.
"""

import hashlib
from collections.abc import Callable, Sequence

from harness.decoding.sampling import SamplingParameters
from harness.engines.http_client import HttpClient, WantedModel
from harness.engines.http_server import Interface, served_model
from harness.engines.protocol import Completion
from harness.engines.running import KINDS
from harness.measurement.generations import Request, stop_reason
from harness.measurement.target_texts import GeneratedText
from harness.records import UserError

# Of an answer's text, what is compared with what its ids stand for
COMPARED_CHARACTERS = 40


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
        """Attach to it and find out what it is.

        Raises:
            UserError: not reachable, or no server that returns token ids.
        """
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
