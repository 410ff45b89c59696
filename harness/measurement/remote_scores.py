"""What servers know of texts: completions with their token ids, and log-probabilities of tokens.

An audition needs the target's completions and every draft's scores of them, and neither needs the
weights here. The completions come from whatever server has the target: llama.cpp's, SGLang's, or
one with `/v1/completions` that returns token ids (vLLM's, with `return_token_ids`). Text alone
would not do, since text that is encoded again may have other tokens.

Above temperature 0 the acceptance rules compare the target's probability of a token with the
draft's. Servers tell log-probabilities of the distribution before temperature, top-k or top-p
apply, and of a few tokens only. At temperature 1 without these that is the distribution that was
drawn from; at another temperature it cannot be had from a few tokens, so other temperatures are
refused (`refuse_sampling`). At temperature 0 a rule asks only whether a token is the draft's
likeliest.

A draft can be on a server too, where that tells log-probabilities of a *prompt* and of the
likeliest token at each place: vLLM's `prompt_logprobs`. It is sent prompt and
completion as one prompt.
"""

import hashlib
from collections.abc import Callable, Sequence

from harness.decoding.sampling import SamplingParameters
from harness.engines import vllm
from harness.engines.client import HttpClient
from harness.engines.http_server import Interface, field_of, only_model
from harness.engines.protocol import RefusedError, ServedRecord
from harness.engines.running import KINDS
from harness.measurement.draft_scores import served_trace
from harness.measurement.generations import Request, stop_reason
from harness.measurement.target_texts import GeneratedText
from harness.records import TextTrace, UserError

# Of an answer's text, what is compared with what its ids stand for
COMPARED_CHARACTERS = 40


def refuse_sampling(sampling: SamplingParameters) -> None:
    """Refuse texts whose log-probabilities a server cannot tell.

    Raises:
        UserError: another temperature than 0 and 1, or sampling parameters that change the
            distribution.
    """
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


# ---- completions ---------------------------------------------------------------------------------


class TextServer:
    """A server with a model that completes prompts, returning token ids."""

    def __init__(self, url: str, key: str | None = None, timeout_factor: float = 1.0) -> None:
        """Attach to it and find out what it is.

        Raises:
            UserError: not reachable, or no server that returns token ids.
        """
        self._client = HttpClient(url, key, "texts_from", timeout_factor=timeout_factor)
        self._kind = self._recognised()
        self.engine = self._kind.engine
        self._compared = False

    @property
    def version(self) -> str:
        """As it reports it; "unknown" where it does not."""
        return self._kind.version_of(self._client)

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
        if answer.tokens is None:
            raise UserError(f"{where}: its answer has no {self._kind.ids!r}; texts need token ids")
        if answer.truncated:
            raise UserError(f"{where}: its context is too small for prompt and new_tokens")
        if answer.k != 0 or self._kind.drafts(self._client):
            raise UserError(
                f"{where}: it drafts, and so its texts are those of the target and a draft, as far"
                " as it is lossless; give a server that decodes plainly"
            )
        if not answer.tokens:
            raise UserError(f"{where}: an answer without tokens")
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

    def _ask(self, request: Request, logprobs: bool) -> ServedRecord:
        client, kind = self._client, self._kind
        seed = _seed(request)
        body = kind.body(request.asked._replace(seed=seed, logprobs=int(logprobs)))
        if kind.names_model:
            body["model"] = only_model(client)
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
    """Of 31 bits, of the run's seed and the text."""
    digest = hashlib.sha256(f"{request.seed} {request.key}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


# ---- a draft's scores ----------------------------------------------------------------------------


class DraftServer:
    """A draft behind a server that tells log-probabilities of a prompt."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        timeout_factor: float = 1.0,
        where: str | None = None,
    ) -> None:
        """Attach to it; errors name it as `where`.

        Raises:
            UserError: not reachable, or no server with `/v1/models`.
        """
        self._client = HttpClient(url, key, "draft.id", where=where, timeout_factor=timeout_factor)
        self._model = only_model(self._client)

    def check_vocabulary(self, tokens: Sequence[int], decoded: str) -> None:
        """Refuse a draft that reads ids as another text than the target's tokenizer, if it says."""
        body = {"model": self._model, "tokens": list(tokens)}
        try:
            answer = self._client.post("/detokenize", body)
        except RefusedError:  # no such path
            return
        there = answer.get("prompt") if isinstance(answer, dict) else None
        if there is not None and str(there).strip() != decoded.strip():
            raise UserError(
                f"{self._client.where}: a draft of another vocabulary than the target's: ids that"
                f" stand for {decoded[:30]!r} are {str(there)[:30]!r} there"
            )

    def score(self, text: GeneratedText, draft_name: str) -> TextTrace:
        """The trace of one text; its temperature is 0, or 1 without other sampling parameters."""
        prompt = [*text.request.tokens, *text.tokens]
        # One token must be generated; of each position the likeliest token is told as well
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        body["prompt_logprobs"] = 1
        deadline_s = self._client.deadline_s(len(prompt), 1)
        answer, _ = self._client.repeated(
            lambda: self._client.post("/v1/completions", body, deadline_s)
        )
        (choice,) = field_of(answer, "choices", self._client.where, vllm.SERVER)
        told = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
        if told is None or len(told) != len(prompt):
            raise UserError(
                f"{self._client.where}: it tells no log-probabilities of a prompt; vLLM does"
                " (prompt_logprobs), for others load the draft here: drafts=[name@folder-or-hub-id]"
            )
        pairs = zip(text.tokens, told[len(text.request.tokens) :], strict=True)
        ranked = [(entry[str(token)], entry.values()) for token, entry in pairs]
        return served_trace(
            text,
            draft_name,
            [float(entry["logprob"]) for entry, _ in ranked],
            # Not by rank: of two tied likeliest tokens vLLM says rank 2
            [e["logprob"] >= max(each["logprob"] for each in all_) for e, all_ in ranked],
        )
