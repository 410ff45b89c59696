"""A server that runs and serves others: its counters are read, its model is asked nothing."""

from collections.abc import Mapping
from time import monotonic
from typing import Any

from harness.engines import llamacpp, sglang, vllm
from harness.engines.client import HttpClient
from harness.engines.counters import CounterNames, Samples
from harness.engines.http_server import Interface, only_model
from harness.engines.protocol import RefusedError
from harness.records import Scrape, UserError
from harness.serving.engines import spec_of

PAGE = "/metrics"
KINDS = (llamacpp.INTERFACE, sglang.INTERFACE, vllm.INTERFACE)


class CountingServer:
    """A server that shows what it counted over all requests.

    Attributes:
        version: as it reports it; "unknown" where it does not.
        model: what it says that it serves; empty where it does not say.
        first: its counters when it was attached to.
    """

    def __init__(self, url: str, key: str | None = None, named: str = "metrics") -> None:
        """Attach to it.

        Raises:
            UserError: not reachable, none of the known engines, or one without counters.
        """
        self._client = HttpClient(url.rstrip("/").removesuffix(PAGE), key, named)
        samples = self._samples()
        self._begin = monotonic()
        for kind in KINDS:
            first = _names(kind).read(samples, 0.0)
            if first is not None:
                self._kind, self.first = kind, first
                break
        else:
            raise self._without_counters()
        self.engine = self._kind.engine
        path, field = self._kind.version
        self.version = str(self._stated(path).get(field, "unknown"))
        try:
            self.model = only_model(self._client)
        except UserError:
            self.model = ""

    @property
    def where(self) -> str:
        """The address as errors name it."""
        return self._client.where

    @property
    def names(self) -> CounterNames:
        """How its engine names what it counts."""
        return _names(self._kind)

    def scrape(self) -> Scrape:
        """Its counters now.

        Raises:
            UserError: it does not answer, or shows them no more.
        """
        samples = self._samples()
        scrape = self.names.read(samples, monotonic() - self._begin)
        if scrape is None:
            raise UserError(f"{self.where}: {PAGE} has no {self.names.tokens} any more")
        return scrape

    def _samples(self) -> Samples:
        """The page; empty where the server has none."""
        try:
            return Samples.of(str(self._client.stated(PAGE)))
        except RefusedError:
            return Samples(())

    def _stated(self, path: str) -> Mapping[str, Any]:
        try:
            answer = self._client.stated(path)
        except RefusedError:  # no such path
            return {}
        return answer if isinstance(answer, dict) else {}

    def _without_counters(self) -> UserError:
        """What shows them, where it is known whose server this is."""
        for kind in KINDS:
            path, field = kind.version
            if field in self._stated(path):
                title = spec_of(kind.engine).title
                return UserError(
                    f"{self.where}: {title} shows no counters at {PAGE}; start it"
                    f" {_names(kind).shown_with}"
                )
        titles = ", ".join(spec_of(kind.engine).title for kind in KINDS)
        return UserError(
            f"{self.where}: no server whose counters are known here; give that of one of {titles}"
        )


def _names(kind: Interface) -> CounterNames:
    assert kind.counters is not None  # of every kind here
    return kind.counters
