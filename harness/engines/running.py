"""A running server that serves other users: its counters are read, and no request is sent."""

from time import monotonic

from harness.engine_facts.engines import spec_of
from harness.engines import llamacpp, sglang, vllm
from harness.engines.counters import Samples
from harness.engines.http_client import HttpClient, WantedModel
from harness.engines.http_server import served_model
from harness.records import Scrape, UserError

PAGE = "/metrics"
KINDS = (llamacpp.INTERFACE, sglang.INTERFACE, vllm.INTERFACE)


class CountingServer:
    """A server that shows its counters over all requests.

    `first` has them at the begin; `version` is "unknown" and `model` empty where it reports none.
    """

    def __init__(self, url: str, key: str | None = None, wanted: WantedModel | None = None) -> None:
        """Attach to it; raises UserError where it is not reachable, or shows no known counters."""
        self._client = HttpClient(url.rstrip("/").removesuffix(PAGE), key, "metrics", wanted=wanted)
        self.where = self._client.where
        self._page = self._samples()
        self._begin = monotonic()
        for kind in KINDS:
            first = kind.counters.read(self._page, 0.0)
            if first is not None:
                break
        else:
            each = (f"{spec_of(kind.engine).title} {kind.counters.shown_with}" for kind in KINDS)
            raise UserError(
                f"{self.where}: no counters that are known here at {PAGE}; start {', '.join(each)}"
            )
        self.first, self.names, self.engine = first, kind.counters, kind.engine
        self.version = kind.version_of(self._client)
        try:
            self.model = served_model(self._client)
        except UserError:
            self.model = ""

    def scrape(self) -> Scrape:
        """The present counters; raises UserError where it does not answer, or show them."""
        self._page = self._samples()
        scrape = self.names.read(self._page, monotonic() - self._begin)
        if scrape is None:
            raise UserError(f"{self.where}: {PAGE} has no {self.names.tokens} any more")
        return scrape

    def check_rounds(self) -> None:
        """Refuse a server of which the last page does not say whether it counted any round."""
        unknown, names = self.names.unknown_rounds(self._page, self.version), self.names
        if unknown is not None:
            raise UserError(
                f"{self.where}: {unknown}, but {PAGE} has no {names.rounds}, the counter of rounds;"
                f" {spec_of(self.engine).title} {names.since} or later has it where it is started"
                f" with {names.drafts_with}, and its version is {self.version}"
            )

    def _samples(self) -> Samples:
        """The samples of the page of counters, of the model that is asked for among several."""
        samples = Samples.shown(lambda: self._client.stated(PAGE))
        if len(samples.models) < 2:
            return samples
        listed = [{"id": name} for name in samples.models]
        return samples.of_model(self._client.wanted.among(listed, f"{self.where}{PAGE}"))
