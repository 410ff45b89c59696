"""report.html: what it says and in which order, that it is one safe file; and in a browser."""

import base64
import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from harness import reporting
from harness.records import Failure
from harness.reporting import definitions, html_report, html_svg
from harness.reporting.content import Content, content_of
from harness.reporting.html_table import html_table, sort_value
from harness.reporting.snippets import Snippet
from harness.reporting.tables import Column, Row, Table
from harness.storage import StoredRun, load
from tests import browser
from tests import reporting_fixtures as made

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("embedded_sweep", "embedded_audition")
RUNS = {
    "sweep": made.sweep_run,
    "partial": made.partial_sweep_run,
    "profile": made.profile_run,
    "breakeven": made.breakeven_run,
    "snapshot": made.snapshot_run,
}
# Headers that name things rather than quantities
WORDS = {"rank", "category", "on", "quantity", "scored on", "what", "why", "rule", "prompt"}
VOID = {"meta", "br", "path", "use", "rect", "stop"}
HOSTILE = """<script>alert(1)</script><img src=x onerror="alert('2')">&amp;"""
ELSEWHERE = "http://example.invalid/x.png"


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

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def values(self, attribute: str) -> list[str]:
        return [found[attribute] for _, found in self.elements if attribute in found]


def written(run: StoredRun) -> str:
    reporting.render(run)
    return (run.folder / "report.html").read_text(encoding="utf-8")


def undrawn(run: StoredRun) -> str:
    """The page without its plots, which take most of the time."""
    return html_report.report(content_of(run), (), run.folder)


def example(name: str, folder: Path) -> StoredRun:
    """A copy of a committed run: rendering writes into its folder."""
    source, copy = ROOT / "results/examples" / name, folder / name
    copy.mkdir()
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("report."):
            (copy / file.name).write_bytes(file.read_bytes())
    return load(copy)


def full_content(run: StoredRun) -> Content:
    """A report with every section in it."""
    snippet = Snippet("vLLM 9", "vllm serve a --draft 'b'", ("quoted under its own rule",))
    return replace(
        content_of(run),
        reasons=("Because of the reason.",),
        caveats=("Beware of the caveat.",),
        failures=("the failure: out of memory",),
        snippets=(snippet, Snippet("llama.cpp 9", "llama-server -md b")),
    )


def drawn(folder: Path) -> list[tuple[str, str]]:
    found = sorted((folder / "plots").glob("*.svg"))
    return [(f"plots/{path.name}", f"caption of {path.stem}") for path in found]


@pytest.fixture(scope="module", params=RUNS)
def any_page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    return Parsed(written(RUNS[request.param](tmp_path_factory.mktemp("any"))))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    run = made.sweep_run(tmp_path_factory.mktemp("sweep"))
    reporting.render(run)
    return run


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("examples")
    pages = {}
    for name in EXAMPLES:
        run = example(name, folder)
        reporting.render(run)
        pages[name] = run.folder / "report.html"
    return pages


def test_every_door_gets_a_whole_page_of_balanced_elements(any_page: Parsed) -> None:
    assert not any_page.unbalanced
    assert not any_page.open
    assert any_page.all("html") == [{"lang": "en"}]
    assert any_page.all("h1")
    assert any_page.all("main")


def test_nothing_in_a_page_is_loaded_from_elsewhere(any_page: Parsed) -> None:
    assert not any_page.all("link")
    assert not any_page.all("img")
    assert not any_page.all("iframe")
    assert not any_page.values("src")
    addresses = [*any_page.values("href"), *any_page.values("xlink:href")]
    assert addresses
    assert all(address.startswith("#") for address in addresses)
    styles = "".join(any_page.words) + " ".join(any_page.values("style"))
    assert "@import" not in styles
    assert not re.search(r"url\((?!#)", styles)


def test_the_policy_of_a_page_allows_its_one_script_and_nothing_else(sweep: StoredRun) -> None:
    text = (sweep.folder / "report.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}';" in policy
    assert len(script.splitlines()) < 50


def test_every_link_within_a_page_leads_somewhere_and_no_id_is_given_twice(
    examples: dict[str, Path],
) -> None:
    for file in examples.values():
        page = Parsed(file.read_text(encoding="utf-8"))
        ids = page.values("id")
        assert len(ids) == len(set(ids))
        targets = {address[1:] for address in page.values("href")}
        assert len(targets) > 20
        assert targets <= set(ids)
        named = {name for value in page.values("aria-labelledby") for name in value.split()}
        assert named <= set(ids)


def test_every_column_of_numbers_leads_to_its_definition(examples: dict[str, Path]) -> None:
    heads = [
        head
        for file in examples.values()
        for head in re.findall(
            r'<th scope="col".*?</th>', file.read_text(encoding="utf-8"), re.DOTALL
        )
    ]
    assert len(heads) > 100
    undefined = [head for head in heads if 'class="num"' in head and 'href="#m-' not in head]
    assert not undefined


@pytest.mark.parametrize("door", RUNS)
def test_the_columns_of_every_door_are_defined_in_the_metrics(door: str, tmp_path: Path) -> None:
    tables = content_of(RUNS[door](tmp_path)).tables
    assert tables
    columns = [column for table in tables for column in table.columns if column.title]
    titles = {column.means or column.one_line for column in columns}
    assert {title for title in titles if definitions.lookup(title) is None} <= WORDS


def test_a_tooltip_is_the_text_of_the_metrics(sweep: StoredRun) -> None:
    page = Parsed((sweep.folder / "report.html").read_text(encoding="utf-8"))
    tips = {found.get("title", "") for found in page.all("a")}
    text = " ".join((ROOT / "harness/reporting/metrics.md").read_text(encoding="utf-8").split())
    alpha = next(tip for tip in tips if tip.startswith("alpha: "))
    assert "accepted / (accepted + rejected), share" in alpha
    assert alpha.removeprefix("alpha: ")[:60] in text


def test_the_metrics_are_parsed_from_headings_rows_and_aliases() -> None:
    text = (
        "# Top\n## Rates (file)\n### `one`\n### `two`\nShared, see [three](#three-x).\n\n"
        "| name | what | unit |\n|---|---|---|\n| `three_x` | a *thing* | ms |\n"
        "| `alias` | [one](#one) |\n"
    )
    found = definitions.parse(text)
    assert found["one"].source == found["two"].source
    assert found["one"].text == "Shared, see three."
    assert found["three_x"].source == "a *thing* (ms)"
    assert found["three_x"].text == "a thing (ms)"
    assert str(found["one"].html) == 'Shared, see <a href="#m-three-x">three</a>.'
    assert "top" not in found


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("tok/s", "tokens_per_second"),
        ("speedup [lo, hi]", "speedup"),
        ("draft step, ms", "draft step"),
        ("j=3", "acceptance_by_position"),
        ("v(K=8)", "v(K)"),
        ("alpha 0.6: best K", "best K"),
    ],
)
def test_a_header_finds_the_definition_behind_its_units_and_numbers(title: str, name: str) -> None:
    found = definitions.lookup(title)
    assert found is not None
    assert found.name == name


def test_a_definition_cannot_carry_markup_into_a_page() -> None:
    found = definitions.parse("### `x`\n<b>bold</b> & `a<b`\n")["x"]
    assert str(found.html) == "&lt;b&gt;bold&lt;/b&gt; &amp; <code>a&lt;b</code>"


def test_what_a_user_calls_a_model_stays_text(tmp_path: Path) -> None:
    named = {**made.PAIR, "model": {"name": HOSTILE}, "draft": {"name": HOSTILE}}
    rows = [replace(row, model=HOSTILE, draft=HOSTILE) for row in made.sweep_rows()]
    verdict = made.verdict(0.0, draft=HOSTILE, reason=HOSTILE)
    summary = made.sweep_summary(
        verdict=verdict,
        per_temperature=(verdict,),
        caveats=(HOSTILE,),
        failures=(Failure(HOSTILE, HOSTILE),),
        headline={HOSTILE: 1.0},
    )
    run = made.stored(
        tmp_path,
        "sweep",
        config={**named, "note": HOSTILE},
        results=rows,
        latency=[replace(row, model=HOSTILE) for row in made.latency_rows()],
        summary=summary,
    )
    run = replace(run, manifest={**run.manifest, HOSTILE: HOSTILE})
    page = Parsed(written(run))
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert not [name for _, found in page.elements for name in found if name.startswith("on")]
    assert not page.unbalanced
    said = "".join(page.words)
    assert said.count(HOSTILE) > 5
    assert "alert(1)" in said


def test_the_verdict_comes_first_then_why_and_caveats_picture_line_and_evidence(
    sweep: StoredRun,
) -> None:
    content = full_content(sweep)
    verdict = {"decision": "speculate"}
    page = html_report.report(content, drawn(sweep.folder), sweep.folder, verdict)
    wanted = [
        "Serve tiny_good at K=2</h2>",
        "vllm serve a --draft &#39;b&#39;",
        "quoted under its own rule",
        "Because of the reason.",
        "Beware of the caveat.",
        "the failure: out of memory",
        "<svg",
        "llama-server -md b",
        "<table",
        "<details",
        '<dt id="m-',
    ]
    places = [page.index(text) for text in wanted]
    assert places == sorted(places)


def test_the_same_order_holds_in_markdown(sweep: StoredRun) -> None:
    from harness.reporting import markdown

    text = markdown.report(full_content(sweep), drawn(sweep.folder), sweep.folder)
    wanted = [
        "**Serve tiny",
        "Because of the reason.",
        "Beware of the caveat.",
        "the failure",
        "![",
        "```sh\nvllm serve a --draft 'b'\n```",
        "quoted under",
        "| ---",
        "<details>",
    ]
    places = [text.index(words) for words in wanted]
    assert places == sorted(places)


def test_the_same_order_holds_in_the_console(tmp_path: Path) -> None:
    advice = {"advice": ["because of the reason"]}
    out = io.StringIO()
    reporting.show(made.sweep_run(tmp_path, extra=advice), Console(file=out, width=80))
    text = " ".join(out.getvalue().split())
    wanted = [
        "Serve tiny_good at K=2",
        "Because of the reason.",
        "Note: Embedded models",
        "vllm serve",
        "Temperature 0, easy prompts",
    ]
    places = [text.index(words) for words in wanted]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("decision", "sentence", "mood"),
    [
        ("speculate", "Serve it at K=2: 1.3x.", "yes"),
        ("does_not_pay", "Do not speculate: too slow.", "no"),
        ("undecided", "Undecided: too few prompts.", "open"),
        (None, "FAIL: speculation changed the output.", "no"),
    ],
)
def test_the_colour_of_a_verdict_follows_what_it_says(
    sweep: StoredRun, decision: str | None, sentence: str, mood: str
) -> None:
    content = replace(content_of(sweep), verdicts=(sentence,))
    page = html_report.report(content, (), sweep.folder, {"decision": decision})
    assert f'class="card verdict {mood}"' in page
    banner = replace(content, banner="Made up.")
    assert 'class="card verdict none"' in html_report.report(banner, (), sweep.folder, None)


def test_an_unfinished_run_is_marked_above_everything(tmp_path: Path) -> None:
    page = undrawn(made.sweep_run(tmp_path, status="running"))
    assert page.index("UNFINISHED RUN") < page.index("Serve tiny_good")
    failed = undrawn(made.partial_sweep_run(tmp_path))
    assert "FAILED RUN" in failed
    assert "hard, temperature 1, K=8: out of memory" in failed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.42x [1.36, 1.48]", "1.42"),
        ("-", ""),
        ("none", ""),
        ("12,345", "12345"),
        ("+0.31", "0.31"),
        ("-0.31", "-0.31"),
        ("> 99 %", "99"),
        ("2.0 GiB", "2147483648"),
        ("512 MiB", "536870912"),
        ("250 ms", "0.25"),
        ("1.0 s", "1"),
    ],
)
def test_a_cell_sorts_by_its_number_in_one_unit(text: str, value: str) -> None:
    assert sort_value(text) == value


def test_the_mark_of_the_best_row_moves_into_its_name() -> None:
    columns = (Column("", "left", key=True), Column("K", key=True), Column("alpha"))
    rows = (Row(("best", "4", "0.9"), best=True), Row(("", "8", "0.8")))
    table = html_table(Table("t", columns, rows), "t")
    assert [column.title for column in table.columns] == ["K", "alpha"]
    assert [row.cells[0].mark for row in table.rows] == ["best", ""]
    assert table.rows[0].cells[0].heads_row


def test_a_drawing_takes_its_colours_from_the_page_and_keeps_its_ids_apart() -> None:
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        ' viewBox="0 0 700 300"><metadata>m</metadata><style>x{}</style><defs><path id="p"/></defs>'
        '<use xlink:href="#p" style="fill: #0072B2; stroke: #ffffff" clip-path="url(#c)"/>'
        '<text style="font-family: serif; font-size: 9px">a &lt; b</text></svg>'
    )
    drawn = html_svg.inline(svg, 'what "it" shows', "one")
    text = str(drawn.svg)
    assert drawn.themed
    assert drawn.width == 700.0
    assert "var(--series-0)" in text
    assert "var(--paper)" in text
    assert 'id="one-p"' in text
    assert 'href="#one-p"' in text
    assert "url(#one-c)" in text
    assert "metadata" not in text
    assert "serif" not in text
    assert "a &lt; b" in text
    assert 'aria-label="what &quot;it&quot; shows"' in text


def test_a_drawing_with_a_colour_of_its_own_keeps_all_of_them() -> None:
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 7 3">'
        '<path style="fill: #0072b2"/><path style="fill: #123456"/></svg>'
    )
    drawn = html_svg.inline(svg, "c", "p")
    assert not drawn.themed
    assert "var(" not in str(drawn.svg)


@pytest.mark.parametrize(("name", "shaded"), [("embedded_sweep", 0), ("embedded_audition", 1)])
def test_every_plot_of_the_examples_but_the_shaded_one_follows_the_scheme(
    name: str, shaded: int, examples: dict[str, Path]
) -> None:
    page = examples[name].read_text(encoding="utf-8")
    assert page.count('class="plot') >= 4
    assert page.count('class="plot fixed') == shaded


def schemes() -> dict[str, dict[str, str]]:
    """The custom properties of the style sheet: light, dark, print."""
    css = (ROOT / "harness/reporting/templates/page.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    return dict(zip(("light", "dark", "print"), found, strict=True))


def contrast(one: str, other: str) -> float:
    """WCAG 2.2: (lighter + 0.05) / (darker + 0.05) of the relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_and_series_stand_out_from_the_paper_in_every_scheme(scheme: str) -> None:
    colours = schemes()[scheme]
    assert len(colours) > 20
    texts = ["ink", "muted", "link", "yes", "no", "open", "none"]
    faint = {
        (name, ground): ratio
        for name in texts
        for ground in ("paper", "page", "code", "best")
        if (ratio := contrast(colours[name], colours[ground])) < 4.5
    }
    assert not faint
    lines = [name for name in colours if name.startswith(("series", "shade"))]
    assert len(lines) == 12
    # labels beside the lines are bold text of that colour; 3 : 1 is the bound for graphics
    assert not {name for name in lines if contrast(colours[name], colours["paper"]) < 3.0}


# ---- in a browser -------------------------------------------------------------------------------

READ = """(() => { const table = document.querySelector("table.sortable");
  return [...table.tBodies[0].rows].map(row => row.cells[%d].textContent.trim()); })()"""
STATE = """[...document.querySelector("table.sortable").tHead.rows[0].cells]
  .map(head => head.getAttribute("aria-sort"))"""
CLICK = """document.querySelector("table.sortable").tHead.rows[0].cells[%d]
  .querySelector("button").%s()"""
BRIGHTNESS = """(() => { const of = (element, name) =>
  getComputedStyle(element)[name].match(/\\d+/g).slice(0, 3).reduce((a, b) => +a + +b, 0) / 765;
  const text = document.querySelector(".plot text"), card = text.closest(".card");
  return [of(card, "backgroundColor"), of(text, "fill"), of(document.body, "color")]; })()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.chromium(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@browser.needs_chromium
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_report_opens_without_a_complaint_and_without_any_request(
    name: str, examples: dict[str, Path], chromium: browser.Browser
) -> None:
    page = chromium.page(examples[name])
    assert page.requests == [examples[name].as_uri()]
    assert page.complaints == []
    assert page.evaluate('document.querySelectorAll("svg").length') >= 4
    assert page.evaluate('document.querySelector(".verdict h2").getBoundingClientRect().top') < 200


@browser.needs_chromium
def test_a_page_that_tries_to_load_or_run_something_is_refused_and_seen(
    sweep: StoredRun, tmp_path: Path, chromium: browser.Browser
) -> None:
    text = (sweep.folder / "report.html").read_text(encoding="utf-8")
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


@browser.needs_chromium
def test_a_table_is_sorted_by_a_click_and_comes_back_to_its_own_order(
    sweep: StoredRun, chromium: browser.Browser
) -> None:
    page = chromium.page(sweep.folder / "report.html")
    title = "Temperature 0, easy prompts"
    assert page.evaluate('document.querySelector("table.sortable caption").textContent') == title
    before = page.evaluate(READ % 1)
    assert before == ["231.5", "311.5", "363.6", "401.6", "336.7"]
    page.evaluate(CLICK % (1, "click"))
    assert page.evaluate(READ % 1) == ["401.6", "363.6", "336.7", "311.5", "231.5"]
    assert page.evaluate(STATE)[1] == "descending"
    page.evaluate(CLICK % (1, "click"))
    assert page.evaluate(READ % 1) == ["231.5", "311.5", "336.7", "363.6", "401.6"]
    assert page.evaluate(STATE)[1] == "ascending"
    page.evaluate(CLICK % (1, "click"))
    assert page.evaluate(READ % 1) == before
    assert set(page.evaluate(STATE)) == {"none"}


@browser.needs_chromium
def test_empty_cells_stay_at_the_end_whichever_way_a_table_is_sorted(
    sweep: StoredRun, chromium: browser.Browser
) -> None:
    page = chromium.page(sweep.folder / "report.html")
    for _ in range(2):
        page.evaluate(CLICK % (3, "click"))
        assert page.evaluate(READ % 3)[-1] == "-"
    assert page.evaluate(READ % 3)[0] == "51.9 %"


@browser.needs_chromium
@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_a_table_is_sorted_from_the_keyboard(
    key: str, sweep: StoredRun, chromium: browser.Browser
) -> None:
    page = chromium.page(sweep.folder / "report.html")
    page.evaluate(CLICK % (1, "focus"))
    page.press(key)
    assert page.evaluate(STATE)[1] == "descending"
    assert page.evaluate(READ % 1)[0] == "401.6"


@browser.needs_chromium
def test_the_first_stop_of_the_keyboard_leads_past_the_header(
    sweep: StoredRun, chromium: browser.Browser
) -> None:
    page = chromium.page(sweep.folder / "report.html")
    page.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the verdict"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0


@browser.needs_chromium
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_phone_scrolls_a_report_down_only_and_shows_the_verdict_at_once(
    name: str, examples: dict[str, Path], chromium: browser.Browser
) -> None:
    page = chromium.page(examples[name], width=360, height=740)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    # The verdict and the line to serve it with; what is to be known of the line may follow
    line = page.evaluate('document.querySelector(".verdict pre").getBoundingClientRect().bottom')
    assert line < 740
    sizes = page.evaluate(
        '[...document.querySelectorAll(".plot")].map(p => p.querySelector("text")'
        ".getBoundingClientRect().height)"
    )
    assert min(sizes) >= 9  # pixels: what is drawn is not shrunk to nothing


@browser.needs_chromium
def test_the_plots_are_legible_in_the_dark_and_white_again_in_print(
    examples: dict[str, Path], chromium: browser.Browser
) -> None:
    page = chromium.page(examples["embedded_sweep"], scheme="dark")
    card, label, words = page.evaluate(BRIGHTNESS)
    assert card < 0.2
    assert label > 0.7
    assert words > 0.7
    page.emulate(scheme="light")
    card, label, words = page.evaluate(BRIGHTNESS)
    assert card > 0.9
    assert max(label, words) < 0.2
    page.emulate(media="print", scheme="dark")
    card, label, words = page.evaluate(BRIGHTNESS)
    assert card > 0.9
    assert max(label, words) < 0.2


@browser.needs_chromium
def test_a_printed_report_is_cut_off_nowhere(
    examples: dict[str, Path], chromium: browser.Browser
) -> None:
    page = chromium.page(examples["embedded_audition"], width=688)  # A4 less its margins
    page.emulate(media="print")
    wide = page.evaluate(
        '[...document.querySelectorAll("table, svg")].filter(e => e.getBoundingClientRect().right'
        " > innerWidth + 1).map(e => e.textContent.slice(0, 80))"
    )
    assert wide == []
    assert base64.b64decode(page.pdf()).startswith(b"%PDF")


@browser.needs_chromium
def test_the_environment_is_folded_away_until_it_is_asked_for(
    sweep: StoredRun, chromium: browser.Browser
) -> None:
    page = chromium.page(sweep.folder / "report.html")
    shown = 'document.querySelector("details .pairs").checkVisibility()'
    assert page.evaluate(shown) is False
    page.evaluate('document.querySelector("details summary").focus()')
    page.press("Enter")
    assert page.evaluate(shown) is True
