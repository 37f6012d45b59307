"""VQA 2.0's own rules: answers normalised, the official accuracy, the list of answers, results."""

import pytest
from places import SHARED
from vqa_files import write_vqa

from vlbert.datasets.vqa import (
    Scores,
    accuracy,
    frequent_answers,
    main,
    normalise,
    read_annotations,
    read_answers,
    read_questions,
    read_results,
    score,
    without_articles,
    without_punctuation,
)

CONFORMANCE = SHARED / "conformance" / "vqa"
official = pytest.mark.skipif(
    not CONFORMANCE.is_dir(), reason="the official formats' samples lie in ../shared, which is not here"
)


@pytest.mark.parametrize(
    ("answer", "without_marks", "normal"),
    [
        ("a-b", "a b", "b"),  # an article is left of it
        ("a -b- c", "a b c", "b c"),
        ("5,000 red/white", "5000 redwhite", "5000 redwhite"),  # a comma between digits: every mark goes
        ("\u0661,\u0662", "\u0661 \u0662", "\u0661 \u0662"),  # the official code knows these digits alone: 0 to 9
        ("3.50.", "3.50", "3.50"),
        ("." * 40, "." * 8, "." * 8),
        ("None of THE Ten", "None of THE Ten", "0 of 10"),
        ("dont wouldntve y'alldve", "dont wouldntve y'alldve", "don't wouldntve y'alldve"),
        ("y'all'dve somebody'd Im oclock", "y'all'dve somebody'd Im oclock", "y'all'd've somebodyd im o'clock"),
        ("what's 5:30 & 50%", "what's 5:30 & 50%", "what's 5:30 & 50%"),
    ],
)
def test_answers_are_normalised_with_the_quirks_of_the_official_code(answer, without_marks, normal):
    assert without_punctuation(answer) == without_marks
    assert without_articles(without_punctuation(answer)) == normalise(answer) == normal


def test_only_answers_on_which_annotators_differ_are_normalised():
    assert accuracy("Yes", ["yes"] * 10) == 0
    assert accuracy("Yes", ["yes"] * 9 + ["no"]) == 1
    assert accuracy(" yes\n", ["yes", "yes\t"] * 5) == 1, "blanks at the ends are no difference"
    assert accuracy("on\nit", ["on it"] * 5 + ["on\tit"] * 5) == 1, "lines and tabs are blanks"
    assert accuracy("on\nit", ["on it"] * 10) == accuracy("on it", ["on\tit"] * 10) == 1
    assert accuracy("the", ["a"] * 5 + ["dog"] * 5) == 1, "both are nothing"
    assert accuracy("two", ["2"] * 3 + ["dog"] * 7) == pytest.approx(0.9)


def scored(results: dict[int, str], said: dict[int, list[str]]) -> Scores:
    annotations = [
        {
            "question_id": i,
            "answers": [{"answer": answer} for answer in answers],
            "answer_type": "even" if i % 2 == 0 else "odd",
            "question_type": "all",
        }
        for i, answers in said.items()
    ]
    return score([{"question_id": i, "answer": answer} for i, answer in results.items()], annotations)


def test_scores_are_rounded_as_the_official_code_rounds():
    said = {i: ["x"] * (i == 3) + ["y"] * (10 - (i == 3)) for i in range(240)}
    found = scored(dict.fromkeys(said, "x"), said)
    assert found.per_question[3] == 30.0
    assert found.overall == 0.13, "0.3 of 240 are 0.125 %, which Python 2 rounds upwards"
    assert found.per_answer_type == {"even": 0.0, "odd": 0.25}
    assert found.per_question_type == {"all": 0.13}


def test_annotators_who_cannot_be_told_apart_are_left_out_together():
    row = {"question_id": 1, "answer_type": "x", "question_type": "x"}
    for ids, expected in (((1, 2, 3), 66.67), ((1, 1, 1), 0.0), ((1, 1, 2), 44.44)):
        answers = [{"answer": answer, "answer_id": i} for answer, i in zip(("Yes", "yes", "yes,"), ids, strict=True)]
        found = score([{"question_id": 1, "answer": "yes"}], [row | {"answers": answers}])
        assert found.overall == expected, "compared as they are when normalised"
    with pytest.raises(ValueError, match="nothing can be scored"):
        score([], [])


def test_ids_of_results_must_match_exactly():
    said = {1: ["x"] * 10, 2: ["x"] * 10}
    for results, told in (({1: "x"}, "miss in the results, such as 2"), ({1: "x", 2: "", 3: ""}, "are not in the ann")):
        with pytest.raises(ValueError, match=f"1 ids of the (results|annotations) {told}"):
            scored(results, said)
    with pytest.raises(ValueError, match="2 ids of the annotations miss in the results, such as 1, 2"):
        scored({"1": "x", "2": "x"}, said)


def test_the_answer_list_holds_what_enough_questions_have_as_their_answer(tmp_path, capsys):
    answers = ["Two"] * 5 + ["2"] * 4 + ["a dog"] * 10 + ["cat"] * 8 + ["zebra"] * 9
    for split, part in (("train2014", answers[::2]), ("val2014", answers[1::2])):
        write_vqa(tmp_path, split, {i: [answer] * 10 for i, answer in enumerate(part)})
    main([str(tmp_path), str(tmp_path / "list.txt"), "--splits", "train2014", "val2014"])
    assert (
        "3 answers; in 13 of 36 questions (36.1%) an annotator wrote one of them; set task.answers=3"
        in capsys.readouterr().out
    )
    assert read_answers(tmp_path / "list.txt", 3) == ["dog", "2", "zebra"]
    main([str(tmp_path), str(tmp_path / "list.json"), "--min-questions", "8"])
    assert read_answers(tmp_path / "list.json", 4) == ["dog", "2", "zebra", "cat"]
    rows = [{"multiple_choice_answer": answer} for answer in answers]
    assert frequent_answers(rows) == ["dog", "2", "zebra"]
    assert frequent_answers([{"multiple_choice_answer": "the"}] * 9) == [], "nothing is no answer"
    for arguments, told in (
        (["--min-questions", "11"], "no answer is that of 11 of 36 questions"),
        (["--splits", "test2015"], "test2015 has no annotations"),
        (["--splits", "minival"], "there is no .*v2_mscoco_minival_annotations.json"),
    ):
        with pytest.raises(SystemExit, match=told):
            main([str(tmp_path), str(tmp_path / "none.txt"), *arguments])
    assert not (tmp_path / "none.txt").exists()


def test_a_results_file_without_an_answer_is_named(tmp_path):
    file = tmp_path / "r.json"
    for text, told in (
        ('[{"question_id": 1, "answer": "x"}, {"question_id": 2}]', "row 1: .*no text as its answer"),
        ('{"question_id": 1}', "an object, not a list"),
        ('[{"question_id": [1], "answer": "x"}]', "row 0"),
        ("[", "is not JSON, or is torn"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=told):
            read_results(file)


@official
def test_the_official_files_are_read_whole():
    questions = read_questions(CONFORMANCE, "synthetic")
    assert len(questions) == 200
    assert questions[0].question_id == 1001000
    assert questions[0].image == "COCO_val2014_000000001001.jpg"
    assert {len(question.answers) for question in questions} == {10}
    assert len(read_annotations(CONFORMANCE / "v2_mscoco_synthetic_annotations.json")) == 200


@official
def test_a_published_answer_list_is_read():
    answers = read_answers(CONFORMANCE / "lxmert_trainval_label2ans_3129.json", 3129)
    assert answers[:3] == ["", "woods", "trash can"]
