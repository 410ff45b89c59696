"""What prompts, model names and manifests hold is text in every report, and never anything else."""

import json
import re
import shutil
from pathlib import Path

import pytest
from runs import FROZEN, ran, timed_little, without_plots
from test_html import Parsed

from harness import reporting
from harness.analysis import analyse
from harness.storage import load

PAYLOADS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "</title><script>alert(1)</script>",
    "</style><style>*{display:none}",
    "<svg/onload=alert(1)>",
    "<a href=javascript:alert(1)>x</a>",
    "<!-- --><iframe src=//example.invalid></iframe>",
    "]]><script>alert(1)</script>",
    "{{7*7}}{% raw %}",
    "&lt;script&gt;alert(1)",
    "data:text/html,<script>alert(1)</script>",
    "| a | b |\n|---|---|",
    "[x](javascript:alert(1))",
    "$\\frac{1}{0}$ _^{",
)


class Elements(Parsed):
    """The kinds of elements and attributes of a page, its links and its text."""

    @property
    def found(self) -> set[str]:
        tags = {tag for tag, _ in self.elements}
        return tags | {f"{tag}.{name}" for tag, names in self.elements for name in names}

    @property
    def links(self) -> list[str]:
        return [link for name in ("href", "src", "action") for link in self.values(name)]

    @property
    def text(self) -> str:
        return "".join(self.words)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Elements, Elements, str]:
    """report.html of an ordinary sweep, of a hostile one, and the hostile one's report.md."""
    root = tmp_path_factory.mktemp("security")
    file = root / "hostile.jsonl"
    lines = [
        {"prompt": f"Say {text}", "id": text.replace("\n", " "), "category": PAYLOADS[index // 4]}
        for index, text in enumerate(PAYLOADS)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        *(f"results_root={root}", "prompts.sets=[]", f"prompts.files=[{file}]", "threads=1"),
        *("k=[1]", "temperature=[0]", "new_tokens=4", "until=all"),
        *(f"model.name={json.dumps(PAYLOADS[0])}", f"draft.name={json.dumps(PAYLOADS[6])}"),
    ]
    with without_plots(), timed_little():  # drawn below, once it is tampered with
        hostile = ran("sweep", *words).folder
    tamper(hostile)
    ordinary = shutil.copytree(FROZEN / "sweep", root / "ordinary")
    for folder in (ordinary, hostile):
        reporting.render(analyse(load(folder)), folder)
    plain, read = (Elements((path / "report.html").read_text()) for path in (ordinary, hostile))
    return plain, read, (hostile / "report.md").read_text()


def tamper(folder: Path) -> None:
    """Put payloads wherever the machine's own words stand in the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    machine = manifest["environment"]
    for index, key in enumerate(sorted(machine)):
        if isinstance(machine[key], str):
            machine[key] = PAYLOADS[index % len(PAYLOADS)]
    machine["python"] = PAYLOADS[0]  # which every page names
    for index, model in enumerate(manifest["models"].values()):
        model["architecture"] = PAYLOADS[index]
        model["engine_reason"] = PAYLOADS[index + 1]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_hostile_run_adds_no_element_no_attribute_and_no_link_to_its_page(
    pages: tuple[Elements, Elements, str],
) -> None:
    plain, hostile, _ = pages
    added = hostile.found - plain.found
    assert not {name for name in added if ".on" in name or name in ("script", "iframe", "img")}
    assert added <= {"li", "ul", "p", "p.class", "details", "summary", "code", "section.id"} | {
        name for name in added if name.split(".")[0] in ("g", "path", "use", "svg", "text", "rect")
    }
    assert hostile.links
    for link in hostile.links:
        assert (
            link.startswith(("#", "data:image/", "report.", "plots/")) or link == "manifest.json"
        ), link
    assert PAYLOADS[0] in hostile.text


def test_markdown_reports_hold_no_html_of_the_users(pages: tuple[Elements, Elements, str]) -> None:
    _, _, markdown = pages
    outside = "".join(markdown.split("```")[::2])
    # A backslash before it makes an opening bracket text
    assert set(re.findall(r"(?<!\\)<\s*/?([a-zA-Z!]+)", outside)) <= {"details", "summary"}
