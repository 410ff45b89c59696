"""report.html: what it says and in which order, that it is one safe file; and in a browser."""

import base64
import hashlib
import pkgutil
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from runs import analysed, sample

from harness import reporting
from harness.reporting import definitions, html
from harness.reporting.content import Content, content_of
from harness.reporting.plots.style import Plot
from harness.reporting.serving_commands import Snippet
from harness.reporting.tables.specification import Column
from tests import browser

ROOT = Path(__file__).resolve().parents[1]
RUNS = ("sweep", "audition", "profile", "breakeven", "snapshot")
VOID = {"meta", "br", "img", "source", "input"}
ELSEWHERE = "http://example.invalid/x.png"

any_run = pytest.mark.parametrize("name", RUNS)


class Parsed(HTMLParser):
    """Every element with its attributes, and the text of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def values(self, attribute: str) -> list[str]:
        return [found[attribute] for _, found in self.elements if attribute in found]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of every stored run."""
    files = {}
    for name in RUNS:
        folder = tmp_path_factory.mktemp(name)
        reporting.render(analysed(name), folder)
        files[name] = folder / "report.html"
    return files


def parsed(file: Path) -> Parsed:
    return Parsed(file.read_text(encoding="utf-8"))


def full_content() -> Content:
    """A report with every section in it."""
    snippet = Snippet("vLLM 9", "vllm serve a --draft 'b'", ("quoted under its own rule",))
    return replace(
        content_of(analysed("sweep")),
        reasons=("Because of the reason.",),
        caveats=("Beware of the caveat.",),
        failures=("the failure: out of memory",),
        snippets=(snippet, Snippet("llama.cpp 9", "llama-server -md b")),
    )


@any_run
def test_a_page_is_one_balanced_file_that_loads_nothing(name: str, pages: dict[str, Path]) -> None:
    page = parsed(pages[name])
    assert not page.unbalanced
    assert not page.open
    assert page.all("html") == [{"lang": "en"}]
    assert page.all("h1")
    assert page.all("main")
    assert not page.all("link")
    assert not page.all("iframe")
    assert all(image["alt"] for image in page.all("img"))
    pictures = [*page.values("src"), *page.values("srcset")]
    assert pictures or name in ("breakeven", "snapshot")
    assert page.values("href")
    assert all(source.startswith("data:image/svg+xml;base64,") for source in pictures)
    assert all(a.startswith("#") or a == "manifest.json" for a in page.values("href"))
    styles = "".join(page.words) + " ".join(page.values("style"))
    assert "@import" not in styles
    assert "url(" not in styles


def test_the_policy_of_a_page_allows_its_one_script_and_images_inside_it(
    pages: dict[str, Path],
) -> None:
    text = pages["sweep"].read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:; ")
    assert f"script-src 'sha256-{digest}';" in policy


@any_run
def test_every_link_within_a_page_leads_somewhere_and_no_id_is_given_twice(
    name: str, pages: dict[str, Path]
) -> None:
    page = parsed(pages[name])
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    within = {address[1:] for address in page.values("href") if address.startswith("#")}
    assert within <= set(ids)
    named = {name for value in page.values("aria-labelledby") for name in value.split()}
    assert named <= set(ids)


def test_every_column_that_some_run_may_have_is_defined_too() -> None:
    names = [each.name for each in pkgutil.walk_packages(reporting.__path__, "harness.reporting.")]
    listed = [v for name in names for v in vars(import_module(name)).values() if type(v) is tuple]
    columns = [each for value in listed for each in value if isinstance(each, Column)]
    assert len(columns) > 150
    numbers = {column.definition or column.one_line for column in columns if column.text}
    assert not [title for title in numbers if definitions.lookup(title) is None]


def test_the_metrics_are_parsed_from_headings_rows_and_aliases() -> None:
    text = (
        "# Top\n## Rates (file)\n### `one`\n### `two`\nShared, see [three](#three-x).\n\n"
        "| name | what | unit |\n|---|---|---|\n| `three_x` | a *thing* | ms |\n"
        "| `alias` | [one](#one) |\n"
    )
    parsed_definitions = definitions.parse(text)
    assert parsed_definitions["one"].source == parsed_definitions["two"].source
    assert parsed_definitions["one"].text == "Shared, see three."
    assert parsed_definitions["three_x"].source == "a *thing* (ms)"
    assert parsed_definitions["three_x"].text == "a thing (ms)"
    assert str(parsed_definitions["one"].html) == 'Shared, see <a href="#m-three-x">three</a>.'
    assert "top" not in parsed_definitions


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("tok/s", "tokens_per_second"),
        ("speedup [lo, hi]", "speedup"),
        ("draft step, ms", "draft step"),
        ("v(K=8)", "v(K)"),
        ("alpha 0.6: best K", "best K"),
    ],
)
def test_a_header_finds_the_definition_behind_its_units_and_numbers(title: str, name: str) -> None:
    definition = definitions.lookup(title)
    assert definition is not None
    assert definition.name == name


def test_a_definition_cannot_carry_markup_into_a_page() -> None:
    definition = definitions.parse("### `x`\n<b>bold</b> & `a<b`\n")["x"]
    assert str(definition.html) == "&lt;b&gt;bold&lt;/b&gt; &amp; <code>a&lt;b</code>"


def test_the_verdict_comes_first_then_why_and_caveats_picture_line_and_evidence(
    pages: dict[str, Path],
) -> None:
    drawing = (pages["sweep"].parent / "plots/speedup_vs_k.svg").read_text(encoding="utf-8")
    page = html.report(full_content(), [Plot("a.svg", "a picture", drawing, Figure())])
    wanted = [
        'class="card verdict yes"',
        "Use tiny_good with K=4",
        "vllm serve a --draft &#39;b&#39;",
        "quoted under its own rule",
        "Because of the reason.",
        "Beware of the caveat.",
        "the failure: out of memory",
        "<img",
        "llama-server -md b",
        'id="table-0"',
        "<details",
        '<dt id="m-',
    ]
    places = [page.index(text) for text in wanted]
    assert places == sorted(places)


def schemes() -> dict[str, dict[str, str]]:
    """The custom properties of the style sheet: light, dark, print."""
    css = (ROOT / "harness/reporting/templates/page.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    colours = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    return dict(zip(("light", "dark", "print"), colours, strict=True))


def contrast(one: str, other: str) -> float:
    """WCAG 2.2: (lighter + 0.05) / (darker + 0.05) of the relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_stands_out_from_the_paper_in_every_scheme(scheme: str) -> None:
    colours = schemes()[scheme]
    assert len(colours) > 10
    texts = ["ink", "muted", "link", "yes", "no", "open", "none"]
    faint = {
        (name, ground): ratio
        for name in texts
        for ground in ("paper", "page", "code", "best", "unsure")
        if (ratio := contrast(colours[name], colours[ground])) < 4.5
    }
    assert not faint


# ---- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.chromium(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@browser.needs_chromium
@pytest.mark.parametrize("name", ["sweep", "audition"])
def test_a_report_opens_without_a_complaint_and_without_any_request(
    name: str, pages: dict[str, Path], chromium: browser.Browser
) -> None:
    page = chromium.page(pages[name])
    assert [url for url in page.requests if not url.startswith("data:")] == [pages[name].as_uri()]
    assert page.complaints == []
    drawn = 'document.querySelectorAll(".plot img")'
    assert page.evaluate(f"[...{drawn}].filter(i => i.naturalWidth > 0).length") >= 1
    assert page.evaluate('document.querySelector(".verdict h2").getBoundingClientRect().top') < 200


@browser.needs_chromium
def test_a_page_that_tries_to_load_or_run_something_is_refused_and_seen(
    pages: dict[str, Path], tmp_path: Path, chromium: browser.Browser
) -> None:
    text = pages["sweep"].read_text(encoding="utf-8")
    hostile = f'<img src="{ELSEWHERE}" onerror="window.ran = 1"><script>window.ran = 2</script>'
    tampered = tmp_path / "tampered.html"
    tampered.write_text(text.replace("<main", f"{hostile}<main", 1), encoding="utf-8")
    page = chromium.page(tampered)
    assert len([text for text in page.complaints if "Content Security Policy" in text]) >= 2
    assert page.evaluate("window.ran === undefined")
    lax = tmp_path / "lax.html"
    without = re.sub(r"<meta http-equiv[^>]*>", "", tampered.read_text(encoding="utf-8"))
    lax.write_text(without, encoding="utf-8")
    assert ELSEWHERE in chromium.page(lax).requests


COPY = 'document.querySelector(".verdict button.copy")'
CODE = 'document.querySelector(".verdict pre > code").textContent'
NO_CLIPBOARD = 'Object.defineProperty(navigator, "clipboard", { value: undefined })'
CLIPBOARD = (
    'Object.defineProperty(navigator, "clipboard",'
    " { value: { writeText: async text => { window.copied = text; } } })"
)
SELECTED = 'addEventListener("copy", () => { window.copied = getSelection().toString(); })'


@browser.needs_chromium
@pytest.mark.parametrize("before", [CLIPBOARD, f"{NO_CLIPBOARD}; {SELECTED}"])
def test_a_button_copies_the_line_to_serve_also_where_a_file_has_no_clipboard(
    before: str, pages: dict[str, Path], chromium: browser.Browser
) -> None:
    page = chromium.page(pages["sweep"])
    page.evaluate(f"{before}; {COPY}.focus()")
    page.press("Enter")
    until = time.monotonic() + browser.PATIENCE_S
    while page.evaluate(f"{COPY}.textContent") != "Copied":
        assert time.monotonic() < until
    assert page.evaluate("window.copied") == page.evaluate(CODE)
    assert page.complaints == []


@browser.needs_chromium
def test_the_first_stop_of_the_keyboard_leads_past_the_header(
    pages: dict[str, Path], chromium: browser.Browser
) -> None:
    page = chromium.page(pages["sweep"])
    page.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the verdict"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0


@browser.needs_chromium
@pytest.mark.parametrize("name", ["sweep", "audition"])
def test_a_phone_scrolls_a_report_down_only_and_shows_the_verdict_at_once(
    name: str, pages: dict[str, Path], chromium: browser.Browser
) -> None:
    page = chromium.page(pages[name], width=360, height=740)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    # The verdict and its picture; what each engine should serve follows
    bars = page.evaluate('document.querySelector(".bars").getBoundingClientRect().toJSON()')
    assert 0 < bars["bottom"] < 740
    assert bars["right"] < 360
    boxes = page.evaluate(
        '[...document.querySelectorAll(".plot")].map(plot => [plot.querySelector("img").width,'
        ' plot.querySelector("img").getAttribute("width"), getComputedStyle(plot).overflowX])'
    )
    assert boxes
    for shown, drawn, overflow in boxes:
        assert shown == float(drawn)  # its text is as large as on a wide page,
        assert overflow == "auto"  # and the plot alone is scrolled


@browser.needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_a_phone_says_how_many_rows_of_the_grid_it_leaves_out_and_shows_them_when_asked(
    width: int, pages: dict[str, Path], chromium: browser.Browser
) -> None:
    page = chromium.page(pages["sweep"], width=width)
    of_grid = '[...document.querySelectorAll(".grid tbody tr")].filter(row => row.offsetHeight)'
    label = 'document.querySelector(".more")'
    shown, every = (
        page.evaluate(f"{rows}.length") for rows in (of_grid, of_grid.partition(".filter")[0])
    )
    said = page.evaluate(f"{label}.offsetHeight ? {label}.textContent.trim() : ''")
    if width == 1280:
        assert (shown, said) == (every, "")
        return
    assert shown < every
    assert said.startswith(f"{every - shown} more row")
    page.evaluate(f"{label}.click()")
    assert page.evaluate(f"{of_grid}.length") == every


@browser.needs_chromium
@pytest.mark.parametrize("name", sample(RUNS, "audition"))
def test_a_printed_report_is_cut_off_nowhere(
    name: str, pages: dict[str, Path], chromium: browser.Browser
) -> None:
    page = chromium.page(pages[name], width=688)  # A4 less its margins
    page.emulate(media="print")
    wide = page.evaluate(
        '[...document.querySelectorAll("table, img")].filter(e => e.getBoundingClientRect().right'
        " > innerWidth + 1).map(e => e.textContent.slice(0, 80))"
    )
    assert wide == []
    assert base64.b64decode(page.pdf()).startswith(b"%PDF")
