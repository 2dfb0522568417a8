"""What submissions/<task>/ says, and which candidate files a person means: eval/tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbsub.adapters.checkout import CheckoutError, find_checkout
from kbsub.adapters.integers import integers
from kbsub.adapters.task import TaskError, resolve_task
from kbsub.eval.operators.register import known
from kbsub.eval.tasks.files import candidate_files
from kbsub.eval.tasks.folder import folder_of, submissions_folder, submissions_roots
from kbsub.eval.tasks.task_file import TaskFile, read_task_file, task_file
from kbsub.eval.tasks.toml_file import TaskFolderError

ROW = 'title = "t"\nprecision = ["fp32"]\ncontract = "tolerance"\n'
FOLDERS = [
    folder for root in submissions_roots() for folder in sorted(root.iterdir()) if (folder / "README.md").is_file()
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A task folder: two declared candidates, not in the order of their names, one forgotten, and a reference."""
    monkeypatch.chdir(tmp_path)
    task, peers = tmp_path / "task", tmp_path / "task" / "peers"
    for where, declared, files in ((task, "two one", "one two forgotten reference"), (peers, "theirs", "theirs")):
        where.mkdir()
        (where / "candidates.toml").write_text("".join(f"[{stem}]\n{ROW}" for stem in declared.split()))
        for stem in files.split():
            (where / f"{stem}.py").write_text("")
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "plain").mkdir()
    return task


# names -> the files meant, relative to the working directory
MEANT = [
    ([], ["task/two.py", "task/one.py", "task/forgotten.py"]),  # declared order; what is not declared still is a file
    (["one"], ["task/one.py"]),
    (["one.py"], ["task/one.py"]),  # there is no one.py here
    (["mine.py", "two"], ["mine.py", "task/two.py"]),
    (["mine"], "mine: no such candidate file, and none of that name in task (there: two, one, forgotten)"),
    (["task/peers"], ["task/peers/theirs.py"]),
    (["task"], ["task/two.py", "task/one.py", "task/forgotten.py"]),
    (["task/two.py", "two"], "task/two.py and "),
    (["elsewhere/one"], "elsewhere/one: no such candidate file"),  # a path is never looked for in the task's folder
    (["plain"], "plain: a folder that declares no candidates (candidates.toml)"),
]


@pytest.mark.parametrize(("names", "meant"), MEANT, ids=[" ".join(names) or "none" for names, _ in MEANT])
def test_which_files_are_meant(folder, names, meant):
    if isinstance(meant, str):
        with pytest.raises(TaskError) as caught:
            candidate_files(names, folder)
        assert str(caught.value).startswith(meant)
    else:
        assert [file.absolute().relative_to(Path.cwd()).as_posix() for file in candidate_files(names, folder)] == meant


NOTHING_TO_CHOOSE = [(None, "no folder under submissions/"), ("plain", "declares no candidates")]


@pytest.mark.parametrize(("where", "words"), NOTHING_TO_CHOOSE)
def test_without_names_and_declarations_the_way_out_is_said(folder, where, words):
    with pytest.raises(TaskError, match=f"{words}.*name the candidate files"):
        candidate_files([], None if where is None else folder.parent / where)


def test_a_candidates_toml_that_is_no_toml_hides_no_file(folder):
    (folder / "candidates.toml").write_text("[[")
    assert [file.stem for file in candidate_files([], folder)] == ["forgotten", "one", "two"]


FOLDER_OF = [
    ("level1_40", submissions_folder("level1_40")),
    ("level9_999", None),
    ("local:some/where/reference.py", Path("some/where")),
    ("some/where/mine.py", Path("some/where")),
]


@pytest.mark.parametrize(("task", "where"), FOLDER_OF)
def test_the_folder_of_a_task(task, where):
    assert folder_of(task) == where


# ---- task.toml ----


def task_of(name):
    """Every problem of KernelBench but the embedded level1_40 needs the checkout."""
    try:
        return resolve_task(name, kernelbench=None)
    except TaskError:
        try:
            return resolve_task(name, kernelbench=find_checkout().path)
        except CheckoutError as error:
            pytest.skip(f"kernelbench: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_task_folder_declares_its_operator_and_sizes_that_its_reference_has(folder):
    found = read_task_file(folder)
    assert found.operator in (None, *known()) and found.title and found.reference
    local = found.reference.endswith(".py")
    task = task_of(str(folder / found.reference) if local else found.reference)
    assert task.slug == folder.name and task_file(task.slug) == found
    assert found.sizes.small and found.sizes.check is not None
    own = integers(task.source)
    for values in (found.sizes.small, found.sizes.check):
        assert all(0 < size <= own[name] for name, size in values.items()), (values, own)


@pytest.mark.parametrize("slug", ["level1_40", "local_layernorm_tokens"])
def test_the_layer_norm_tasks_say_that_they_are(slug):
    assert task_file(slug).operator == "layer_norm"


def test_a_task_without_a_file_gets_the_defaults(tmp_path):
    assert read_task_file(tmp_path) == read_task_file(None) == task_file("level9_999") == TaskFile()
    assert TaskFile().operator is None and TaskFile().sizes.small is None


# content -> what the refusal says
REFUSED = {
    "operator =": "is not TOML",
    'operater = "layer_norm"': "operater",
    "[sizes]\nsmall = { rows = 'x' }": "sizes.small.rows",
    'reference = "level1_41"': "but the folder is level1_40",
    'reference = "reference.py"': "neither level<L>_<id> nor a file of the folder",
}


@pytest.mark.parametrize("content", REFUSED)
def test_a_task_file_that_cannot_be_believed_is_refused_by_name(tmp_path, content):
    folder = tmp_path / "level1_40"
    folder.mkdir()
    (folder / "task.toml").write_text(content)
    with pytest.raises(TaskFolderError, match=r"task\.toml") as caught:
        read_task_file(folder)
    assert REFUSED[content] in str(caught.value)
