"""Files are found by path, folder, glob and URL, and named alike wherever they lie."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.data.helpers import write
from tpu_train.data.files import find_files, walk


def names(path: Path | str) -> list[str]:
    files = find_files(str(path))
    for file in files:
        with file.open() as stream:
            assert stream.read() == b"x"
    return [file.name for file in files]


def write_folder(root: Path) -> list[str]:
    found = ["sub/a.jsonl", "sub/deep/b.txt", "sub/deep/c.parquet", "y.jsonl.gz", "z.jsonl.zst"]
    for name in [*found, "sub/readme.md", "y.gz"]:
        write(root / name, "x")
    return found


def test_folders_and_globs_name_files_alike(tmp_path: Path) -> None:
    found = write_folder(tmp_path)
    assert names(tmp_path) == found
    assert names(tmp_path / "**" / "*") == found
    assert names(tmp_path / "sub" / "*") == ["a.jsonl"]
    assert names(tmp_path / "s*" / "*.jsonl") == ["sub/a.jsonl"]


def test_urls_name_files_as_folders_do(tmp_path: Path) -> None:
    found = write_folder(tmp_path / "data")
    url = f"file://{tmp_path}/data"
    assert names(url) == names(f"{url}/**") == found
    assert names(f"{url}/sub/a.jsonl") == ["a.jsonl"]
    assert names(f"{url}/s*/*.jsonl") == ["sub/a.jsonl"]


@pytest.fixture
def memory() -> Iterator[str]:
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe({"/bucket/b.txt": b"x", "/bucket/sub/a.jsonl": b"x", "/bucket/c.md": b""})
    yield "memory://bucket"
    system.rm("/bucket", recursive=True)


def test_other_file_systems_are_read_and_have_versions(memory: str) -> None:
    assert names(memory) == names(f"{memory}/**") == ["b.txt", "sub/a.jsonl"]
    assert names(f"{memory}/*.txt") == names(f"{memory}/b.txt") == ["b.txt"]
    (file,) = find_files(f"{memory}/b.txt")
    before = file.version()
    assert file.version() == before
    file.remote[0].pipe({"/bucket/b.txt": b"changed"})  # pyright: ignore[reportOptionalSubscript]
    assert file.version() != before


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://a", r"nowhere://a: Protocol not known: nowhere"),
        ("memory://bucket/none", r"none: no such file or folder, and as a glob it matches nothing"),
        (
            "memory://bucket/*.md",
            r"\*.md: matches 1 paths, none of them a .txt, .* or .parquet file \(first: /bucket/c",
        ),
        ("memory://bucket/c.md", r"c.md: a .md; text is read from"),
    ],
)
def test_urls_without_data_are_errors(memory: str, url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_files(url)


def test_a_name_with_wildcards_that_exists_is_that_file(tmp_path: Path) -> None:
    assert names(write(tmp_path / "a[1].txt", "x")) == ["a[1].txt"]


def test_paths_may_be_relative_or_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", "x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("a.txt") == names("*.txt") == names(".") == names("~/a.txt") == names("~/*.txt") == ["a.txt"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", r"nothing: no such file or folder, and as a glob it matches nothing"),
        ("*.txt", r"\*.txt: no such file or folder"),
        ("a.md", r"a.md: a .md; text is read from .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet"),
        ("plain", r"plain: a file without suffix; text is read from"),
        ("empty", r"empty: no .txt, .* or .parquet file in this folder or below"),
        ("*.md", r"\*.md: matches 1 paths, none of them a .txt, .* file \(first: .*a.md\)"),
    ],
)
def test_nothing_to_read_is_an_error(tmp_path: Path, path: str, message: str) -> None:
    write(tmp_path / "a.md", "")
    write(tmp_path / "plain", "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        find_files(str(tmp_path / path))


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        walk(tmp_path / "gone", (".txt",))
