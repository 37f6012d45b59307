"""VQA 2.0's official files: normalised answers, the official accuracy, the answer list, results."""

import numpy as np
import pytest
from vqa_files import write_vqa

from vlbert.datasets.vqa import (
    Scores,
    accuracy,
    main,
    normalise,
    read_answers,
    read_questions,
    read_results,
    score,
    soft_score,
    without_punctuation,
)


def test_answers_are_normalised_as_by_the_official_code():
    """What tests/data/conformance, which holds 149 answers, lacks."""
    assert without_punctuation("\u0661,\u0662") == "\u0661 \u0662", "digits are 0 to 9 alone"
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


def test_a_soft_score_leaves_each_annotator_out_in_turn():
    for count in range(11):
        agrees = [True] * count + [False] * (10 - count)
        left_out = [min(1, sum(agrees[:i] + agrees[i + 1 :]) / 3) for i in range(10)]
        assert soft_score(count, 10) == pytest.approx(np.mean(left_out))


def scored(results: dict[int, str], answers: dict[int, list[str]]) -> Scores:
    annotations = [
        {
            "question_id": i,
            "answers": [{"answer": answer} for answer in of_question],
            "answer_type": "even" if i % 2 == 0 else "odd",
            "question_type": "all",
        }
        for i, of_question in answers.items()
    ]
    return score([{"question_id": i, "answer": answer} for i, answer in results.items()], annotations)


def test_scores_are_rounded_as_by_the_official_code():
    answers = {i: ["x"] * (i == 3) + ["y"] * (10 - (i == 3)) for i in range(240)}
    found = scored(dict.fromkeys(answers, "x"), answers)
    assert found.per_question[3] == 30.0
    assert found.overall == 0.13, "0.3 of 240 are 0.125 %, which Python 2 rounds upwards"
    assert found.per_answer_type == {"even": 0.0, "odd": 0.25}
    assert found.per_question_type == {"all": 0.13}


def test_equal_annotators_are_left_out_together():
    row = {"question_id": 1, "answer_type": "x", "question_type": "x"}
    for ids, expected in (((1, 2, 3), 66.67), ((1, 1, 1), 0.0), ((1, 1, 2), 44.44)):
        answers = [{"answer": answer, "answer_id": i} for answer, i in zip(("Yes", "yes", "yes,"), ids, strict=True)]
        found = score([{"question_id": 1, "answer": "yes"}], [row | {"answers": answers}])
        assert found.overall == expected, "compared as they are when normalised"


@pytest.mark.parametrize(
    ("results", "named"),
    [
        ({1: "x"}, "1 ids of the annotations miss in the results, such as 2"),
        ({1: "x", 2: "", 3: ""}, "1 ids of the results are not in the annotations, such as 3"),
        ({"1": "x", "2": "x"}, "2 ids of the annotations miss in the results, such as 1, 2"),
        (None, "nothing can be scored"),
    ],
)
def test_ids_of_results_must_match_exactly(results, named):
    with pytest.raises(ValueError, match=named):
        scored(results, {1: ["x"] * 10, 2: ["x"] * 10}) if results else score([], [])


def test_the_answer_list_holds_the_answers_of_enough_questions(tmp_path, capsys):
    answers = ["Two"] * 5 + ["2"] * 4 + ["a dog"] * 10 + ["cat"] * 8 + ["zebra"] * 9 + ["the"] * 9
    for split, part in (("train2014", answers[::2]), ("val2014", answers[1::2])):
        write_vqa(tmp_path, split, {i: [answer] * 10 for i, answer in enumerate(part)})
    main([str(tmp_path), str(tmp_path / "list.txt"), "--splits", "train2014", "val2014"])
    assert "3 answers; in 13 of 45 questions (28.9%)" in capsys.readouterr().out
    assert read_answers(tmp_path / "list.txt", 3) == ["dog", "2", "zebra"]
    main([str(tmp_path), str(tmp_path / "list.json"), "--min-questions", "8"])
    assert read_answers(tmp_path / "list.json", 4) == ["dog", "2", "zebra", "cat"]
    for arguments, named in (
        (["--min-questions", "11"], "no answer is that of 11 of 45 questions"),
        (["--splits", "test2015"], "test2015 has no annotations"),
        (["--splits", "minival"], "there is no .*v2_mscoco_minival_annotations.json"),
    ):
        with pytest.raises(SystemExit, match=named):
            main([str(tmp_path), str(tmp_path / "none.txt"), *arguments])
    assert not (tmp_path / "none.txt").exists()


def test_an_answer_list_is_normalised(tmp_path):
    (tmp_path / "list.txt").write_text("<unk>\n Yes \nleft-right\nU.S.A.\nleft/right\n\n")
    assert read_answers(tmp_path / "list.txt", 6) == ["<unk>", "yes", "left right", "usa", "left right", ""]
    (tmp_path / "list.json").write_text('["", "Left/Right"]')
    assert read_answers(tmp_path / "list.json", 2) == ["", "left right"]


Q, A = "v2_OpenEnded_mscoco_one_questions.json", "v2_mscoco_one_annotations.json"


@pytest.mark.parametrize(
    ("file", "before", "after", "named"),
    [
        (A, "question_id", "id", r"annotations\[0\]: KeyError"),
        (A, "answer_type", "type", r"annotations\[0\]: KeyError"),
        (A, '"question_id": 10', '"question_id": [10]', r"annotations\[0\]: TypeError"),
        (A, '"multiple_choice_answer": "yes"', '"multiple_choice_answer": 1', r"annotations\[0\]: .* no text"),
        (A, '"answer": "yes"', '"answer": 1', r"annotations\[0\]: .* no text"),
        (A, "}]}]}", "", "is not JSON, or is torn"),
        (A, '"question_id": 10', '"question_id": 12', r"1 ids of .*questions.json miss in .*annotations.json, such as"),
        (Q, '"question_id": 10', '"question_id": 12', r"1 ids of .*questions.json miss in .*annotations.json, such as"),
        (Q, '"image_id": 1', '"image_id": 2', r"questions\[0\]: .*it is about image 2, its annotation about 1"),
        (Q, "image_id", "image", r"questions\[0\]: KeyError\('image_id'\)"),
        (Q, '"Is it on the left, 10?"', "7", r"questions\[0\]: .*the question is no text: 7"),
        (Q, '"questions"', '"rows"', "questions: no such list"),
        (Q, None, None, "there is no .*; .*task.folder"),
        ("list.txt", None, None, "there is no answer list .*; .*task.answer_list"),
        ("list.txt", "", "yes\n", "holds 1 answers, task.answers is 6"),
        ("list.json", "", '{"left": 0}', "holds an object, not a list"),
        ("list.json", "", "[1]", "is no list of answers"),
        ("results.json", "", '[{"question_id": 1, "answer": "x"}, {"question_id": 2}]', "row 1: .*no text as its answ"),
        ("results.json", "", '[{"question_id": [1], "answer": "x"}]', "row 0"),
        ("results.json", "", "[", "is not JSON, or is torn"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, file, before, after, named):
    write_vqa(tmp_path, "one", {10: ["yes"] * 10})
    read = {Q: lambda: read_questions(tmp_path, "one"), "results.json": lambda: read_results(tmp_path / file)}
    read[A] = read[Q]
    if before is None:
        (tmp_path / file).unlink(missing_ok=True)
    else:
        text = (tmp_path / file).read_text() if before else ""
        assert before in text
        (tmp_path / file).write_text(text.replace(before, after) if before else after)
    with pytest.raises(ValueError, match=named) as error:
        read.get(file, lambda: read_answers(tmp_path / file, 6))()
    assert file in str(error.value)
