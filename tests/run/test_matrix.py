"""What matrix.json says, and how variants are named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import ConfigurationError, RunRefused
from steelyard.run.matrix import Matrix, is_matrix, make_variants, read_matrix, write_matrix


def test_a_matrix_is_read_as_it_was_written(tmp_path) -> None:
    axes = {"target": ["small", "large"], "prompt": ["terse", "long"], "temperature": ["0", "0.7"]}
    matrix = Matrix(suite="sums", axes=axes, variants=make_variants(axes))
    assert not is_matrix(tmp_path)
    write_matrix(tmp_path, matrix)
    assert is_matrix(tmp_path)
    assert read_matrix(tmp_path) == matrix
    assert matrix.variants[1].name == "small/terse/temperature=0.7"
    assert matrix.variants[1].axes == {"target": "small", "prompt": "terse", "temperature": "0.7"}
    assert matrix.runs(tmp_path)["large/long/temperature=0"] == tmp_path / "large-long-temperature=0"


def test_two_variants_with_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two variants would be named 'a/b/c'"):
        make_variants({"target": ["a", "a/b"], "prompt": ["b/c", "c"]})


def test_known_variants_keep_their_directories() -> None:
    before = make_variants({"target": ["a b"]})
    after = make_variants({"target": ["a-b", "a b"]}, before)
    assert {v.name: v.directory for v in after} == {"a b": "a-b", "a-b": "a-b-2"}


@given(st.lists(st.text(min_size=1, max_size=100), min_size=1, max_size=8, unique=True))
def test_directories_are_safe_and_differ_whatever_the_names(tmp_path_factory, names) -> None:
    axes = {"target": names}
    variants = make_variants(axes)
    assert len({v.directory.casefold() for v in variants} | {"previous"}) == len(names) + 1
    folder = tmp_path_factory.mktemp("matrix")
    write_matrix(folder, Matrix(suite="s", axes=axes, variants=variants))
    read = read_matrix(folder)
    assert [v.directory for v in read.variants] == [v.directory for v in variants]
    for place in read.runs(folder).values():
        assert place.parent == folder
        place.mkdir()


def test_too_many_variants_are_refused_with_the_sizes_of_the_axes() -> None:
    with pytest.raises(ConfigurationError, match=r"100 variants \(10 target × 10 prompt\) are more than 64"):
        make_variants({"target": list("abcdefghij"), "prompt": list("abcdefghij")})


@pytest.mark.parametrize("directory", ["..", "../x", "a/b", "", "/etc", "."])
def test_a_directory_outside_the_folder_is_refused(tmp_path, directory) -> None:
    variant = {"name": "a", "directory": directory, "axes": {"target": "a"}}
    (tmp_path / "matrix.json").write_text(json.dumps({"suite": "s", "axes": {}, "variants": [variant]}))
    with pytest.raises(RunRefused, match="is not the name of a run directory"):
        read_matrix(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"suite": "s"}', '{"v": 99, "suite": "s", "axes": {}, "variants": []}']
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text) -> None:
    with pytest.raises(RunRefused, match="holds no matrix"):
        read_matrix(tmp_path)
    (tmp_path / "matrix.json").write_text(text)
    with pytest.raises(RunRefused, match=r"matrix\.json"):
        read_matrix(tmp_path)
