"""Tables as Markdown and for terminals."""

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
