"""Tables as Markdown and for terminals."""

import pytest

from storage.tables import aligned, markdown

HEAD = ("name", "rows", "share", "lost", "by")
ROWS = [("a", "1,234", "75.0%", "–", "x 1"), ("longer", "5", "-2.5 %", "", "y")]


def test_columns_of_numbers_stand_to_the_right():
    lines = aligned(HEAD, ROWS)
    assert lines == [
        "name     rows   share  lost  by",
        "a       1,234   75.0%     –  x 1",
        "longer      5  -2.5 %        y",
    ]
    assert markdown(HEAD, ROWS).splitlines()[:3] == [
        "| name | rows | share | lost | by |",
        "| --- | ---: | ---: | ---: | --- |",
        "| a | 1,234 | 75.0% | – | x 1 |",
    ]


def test_a_table_without_rows_is_its_head_or_nothing():
    assert markdown(HEAD, []) == "| name | rows | share | lost | by |\n| --- | --- | --- | --- | --- |"
    assert aligned(HEAD, []) == []


@pytest.mark.parametrize("write", [markdown, aligned])
@pytest.mark.parametrize("row", [("short",), ("long", *"123456")])
def test_a_row_has_as_many_cells_as_the_head(write, row):
    with pytest.raises(ValueError, match="argument"):
        write(HEAD, [*ROWS, row])
