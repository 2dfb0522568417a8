"""The page of a leaderboard: in a real headless Chromium where there is one; its text and the tables anywhere."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app
from support.judged_rows import guards, official, put, source

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
EVIL = '<script>document.title="broken"</script>"><b>'


@pytest.fixture
def written(tmp_path):
    """A leaderboard of one run with a space in its name, in a folder beside it."""
    run = tmp_path / "a model #1"
    put(run, 1, 1, 0, official(True, 1.0, 10.0), source=source({"=batch_size": {"task": "16", "file": "1"}}, False))
    put(run, 1, 2, 0, official(True, 1.0, 9.0), guards=guards(EVIL))
    put(run, 1, 3, 0, official(False))
    put(run, 1, 4, 0, official(True, 1.0, 2.0), blind_spots="this task also accepts zeros")
    done = CliRunner().invoke(app, ["leaderboard", str(run), "--out", str(tmp_path / "board")])
    assert done.exit_code == 0, done.output
    return tmp_path / "board"


def test_one_file_that_needs_no_other_and_lets_no_text_act(written):
    text = (written / "leaderboard.html").read_text()
    assert EVIL not in text and "&lt;script&gt;document.title" in text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text), "it must open from a disk without a network"
    assert 'name="viewport"' in text


def test_a_board_of_numbers_alone_and_the_page_made_from_it(written, tmp_path):
    run, kept = str(tmp_path / "a model #1"), tmp_path / "kept"
    call = ["leaderboard", run, "--numbers-only", "--out", str(kept), "--name", "corpus"]
    assert CliRunner().invoke(app, call).exit_code == 0
    assert {file.suffix for file in kept.iterdir()} >= {".html", ".md", ".csv", ".json"}
    assert {file.stem for file in kept.iterdir()} == {"corpus"}
    made = CliRunner().invoke(app, ["leaderboard", str(kept / "corpus.json"), "--out", str(tmp_path / "again")])
    assert made.exit_code == 0, made.output
    for ending in ("html", "md", "csv", "json"):
        again = (tmp_path / "again" / f"leaderboard.{ending}").read_text()
        assert again == (kept / f"corpus.{ending}").read_text() and "kbsub_rows" not in again
    for text in ("{}", '{"what": "leaderboard", "schema": 1}', '{"what": "leaderboard", "schema": 0}', "[", "[]"):
        (tmp_path / "no.json").write_text(text)
        refused = CliRunner().invoke(app, ["leaderboard", str(tmp_path / "no.json"), "--out", str(tmp_path / "none")])
        assert refused.exit_code == 2 and "is no board of this version" in refused.output, (text, refused.output)
    assert CliRunner().invoke(app, [*call[:-1], "../corpus"]).exit_code == 2


def test_each_row_links_to_its_evidence(written):
    text = (written / "leaderboard.html").read_text()
    links = re.findall(r'href="([^"]+)"', text)
    assert len(links) == 4 and all(link.startswith("../a%20model%20%231/kbsub_rows/") for link in links), links
    from urllib.parse import unquote

    assert all(json.loads((written / unquote(link)).read_text())["schema"] for link in links)


def test_the_files_hold_the_same_rows_and_no_path_of_this_machine(written):
    board = json.loads((written / "leaderboard.json").read_text())
    rows = list(csv.DictReader((written / "leaderboard.csv").open()))
    assert len(board["rows"]) == len(rows) == 4
    assert [float(row["speedup"]) if row["speedup"] else None for row in rows] == [10.0, 9.0, None, 2.0]
    assert rows[0]["overrides"] == "'=batch_size", "a spreadsheet must not compute it"
    for file in written.iterdir():
        assert str(written.parent) not in file.read_text(), file.name
    table = (written / "leaderboard.md").read_text()
    assert "| a model #1 | 1 | 4 | 4 | 3 | 100 | 0.750 |" in table, table


def test_numbers_only_holds_no_word_of_a_file_and_no_link(tmp_path):
    run = tmp_path / "model"
    put(run, 1, 2, 0, official(True, 1.0, 9.0), guards=guards("stale_memory"))
    put(run, 1, 4, 0, {**official(False), "metadata": {"runtime_error": "their_secret_name is not defined"}})
    out = tmp_path / "board"
    done = CliRunner().invoke(app, ["leaderboard", str(run), "--numbers-only", "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads((out / "leaderboard.json").read_text())["rows"]
    assert [row["problems"] for row in rows] == [["guards: stale_memory"], ["official: INCORRECT_NUMERICAL"]]
    assert not any("their_secret" in path.read_text() for path in out.iterdir())
    assert "<a href" not in (out / "leaderboard.html").read_text()


def test_a_wrong_call_is_said(tmp_path):
    done = CliRunner().invoke(app, ["leaderboard", str(tmp_path), "--k", "1,x"])
    assert done.exit_code == 2 and "write numbers by comma" in done.output


# What a person does on the page, and what must then be seen. `say` collects; the title hands it out.
ACTS = """
const say = [], rows = () => [...document.querySelectorAll("#rows tbody tr")];
const shown = () => rows().filter(row => getComputedStyle(row).display !== "none");
const problems = list => list.map(row => row.cells[2].textContent).join("");
const button = name => [...document.querySelectorAll("#rows th button")].find(each => each.textContent === name);
say.push(["all", problems(shown())]);
button("speedup").click(); say.push(["ascending", problems(rows())]);
button("speedup").click(); say.push(["descending", problems(rows())]);
words.value = "zeros"; words.dispatchEvent(new Event("input")); say.push(["filtered", problems(shown())]);
words.value = ""; words.dispatchEvent(new Event("input"));
state.value = "bad"; state.dispatchEvent(new Event("change")); say.push(["bad", problems(shown())]);
say.push(["count", document.getElementById("shown").textContent]);
say.push(["wider than the window", String(document.documentElement.scrollWidth > innerWidth)]);
say.push(["title", document.title]);
const out = document.createElement("pre"); out.id = "said"; out.textContent = JSON.stringify(Object.fromEntries(say));
document.body.append(out);
"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1400])
def test_sorting_and_filtering_in_a_real_browser(written, tmp_path, width):
    """On a phone and on a desk. The page is the one that was written, with a person's acts put behind its script."""
    acted = written / "acted.html"
    acted.write_text((written / "leaderboard.html").read_text().replace("</body>", f"<script>{ACTS}</script></body>"))
    options = f"--headless=new --no-sandbox --disable-gpu --user-data-dir={tmp_path / 'profile'}".split()
    # A headless window has a least width: the page's own is set by a frame of that width.
    frame = written / "frame.html"
    frame.write_text(f'<iframe src="acted.html" style="width:{width}px;height:900px;border:0"></iframe>')
    command = [str(CHROMIUM), *options, "--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom"]
    target = acted if width > 1000 else frame
    if target is frame:
        frame.write_text(
            frame.read_text().replace(
                "</iframe>",
                "</iframe><script>onload = () => { document.body.append("
                "document.querySelector('iframe').contentDocument.getElementById('said').cloneNode(true)); }</script>",
            )
        )
    done = subprocess.run([*command, target.as_uri()], capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    said = json.loads(match[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert said == {
        "all": "1234",
        "ascending": "4213",
        "descending": "1243",
        "filtered": "4",
        "bad": "123",
        "count": "3",
        "wider than the window": "false",
        "title": "Leaderboard",
    }


def test_where_nothing_is_official_the_zeros_are_explained(tmp_path):
    """On a machine without a GPU every figure of upstream's is empty; one official row and the sentence is gone."""
    run = tmp_path / "model"
    row = put(run, 1, 2, 0, official(True))
    row.write_text(json.dumps({**json.loads(row.read_text()), "status": "NOT_RUN"}))  # it says nothing official
    said = CliRunner().invoke(app, ["leaderboard", str(run), "--out", str(tmp_path / "board")])
    assert said.exit_code == 0 and "No row has an official verdict, which takes a GPU" in said.output
    put(run, 1, 2, 1, official(False))
    said = CliRunner().invoke(app, ["leaderboard", str(run), "--out", str(tmp_path / "board")])
    assert said.exit_code == 0 and "No row has" not in said.output
