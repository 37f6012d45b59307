"""VQA 2.0's official files: normalised answers, the official accuracy, the answer list."""

import pytest
from vqa_files import write_vqa

from vlbert.datasets.vqa import accuracy, main, normalise, read_answers, read_questions, remove_punctuation


def test_answers_are_normalised_as_by_the_official_code():
    """What tests/data/conformance, which holds 149 answers, lacks."""
    assert remove_punctuation("\u0661,\u0662") == "\u0661 \u0662", "digits are 0 to 9 alone"
    assert normalise("5,000 red/white") == "5000 redwhite", "a comma between digits: every mark goes"
    assert normalise("dont wouldntve y'alldve y'all'dve Im") == "don't wouldntve y'alldve y'all'd've im"


def test_answers_are_normalised_only_where_annotators_differ():
    assert accuracy("Yes", ["yes"] * 10) == 0
    assert accuracy("Yes", ["yes"] * 9 + ["no"]) == 1
    assert accuracy(" yes\n", ["yes", "yes\t"] * 5) == 1, "blanks at the ends are no difference"
    assert accuracy("on\nit", ["on it"] * 5 + ["on\tit"] * 5) == 1, "lines and tabs are blanks"
    assert accuracy("on\nit", ["on it"] * 10) == accuracy("on it", ["on\tit"] * 10) == 1
    assert accuracy("the", ["a"] * 5 + ["dog"] * 5) == 1, "both are empty"
    assert accuracy("two", ["2"] * 3 + ["dog"] * 7) == pytest.approx(0.9)


def test_the_answer_list_holds_the_answers_of_enough_questions_and_is_normalised(tmp_path, capsys):
    answers = ["Two"] * 5 + ["2"] * 4 + ["a dog"] * 10 + ["cat"] * 8 + ["zebra"] * 9 + ["the"] * 9
    for split, part in (("train2014", answers[::2]), ("val2014", answers[1::2])):
        write_vqa(tmp_path, split, {i: [answer] * 10 for i, answer in enumerate(part)})
    main([str(tmp_path), str(tmp_path / "list.txt"), "--splits", "train2014", "val2014"])
    assert "3 answers from 45 questions; set --task.answers 3" in capsys.readouterr().out
    assert read_answers(tmp_path / "list.txt", 3) == ["dog", "2", "zebra"]
    main([str(tmp_path), str(tmp_path / "list.txt"), "--min-questions", "8"])
    assert read_answers(tmp_path / "list.txt", 4) == ["dog", "2", "zebra", "cat"]
    for arguments, named in (
        (["--min-questions", "11"], "no answer occurs in 11 of 45 questions"),
        (["--splits", "minival"], "there is no .*v2_mscoco_minival_annotations.json"),
    ):
        with pytest.raises(SystemExit, match=named):
            main([str(tmp_path), str(tmp_path / "none.txt"), *arguments])
    assert not (tmp_path / "none.txt").exists()
    (tmp_path / "list.txt").write_text("<unk>\n Yes \nleft-right\nU.S.A.\nleft/right\n\n")
    assert read_answers(tmp_path / "list.txt", 6) == ["<unk>", "yes", "left right", "usa", "left right", ""]


Q, A = "v2_OpenEnded_mscoco_one_questions.json", "v2_mscoco_one_annotations.json"


@pytest.mark.parametrize(
    ("file", "before", "after", "named"),
    [
        (A, "question_id", "id", r"annotations\[0\]: KeyError"),
        (A, '"answer": "yes"', '"answer": 1', r"annotations\[0\]: .* not a string"),
        (A, '"question_id": 10', '"question_id": 12', r"1 ids of .*questions.json are missing in .*annotations.json,"),
        (Q, '"image_id": 1', '"image_id": 2', r"questions\[0\]: .*it is about image 2, its annotation about 1"),
        (Q, '"Is it on the left, 10?"', "7", r"questions\[0\]: .*the question is not a string: 7"),
        (Q, '"questions"', '"rows"', "questions: no such list"),
        (Q, None, None, "there is no .*; .*task.folder"),
        ("list.txt", None, None, "there is no .*; .*task.answer_list; `vlbert vqa-answers"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, file, before, after, named):
    write_vqa(tmp_path, "one", {10: ["yes"] * 10})
    read = dict.fromkeys((Q, A), lambda: read_questions(tmp_path, "one"))
    if before is None:
        (tmp_path / file).unlink(missing_ok=True)
    else:
        text = (tmp_path / file).read_text() if before else ""
        assert before in text
        (tmp_path / file).write_text(text.replace(before, after) if before else after)
    with pytest.raises(ValueError, match=named) as error:
        read.get(file, lambda: read_answers(tmp_path / file, 6))()
    assert file in str(error.value)
