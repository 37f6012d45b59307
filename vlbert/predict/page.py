"""The page of `vlbert predict CHECKPOINT --serve`, for the browsers of this machine.

It listens on 127.0.0.1 alone. A page of another site cannot use it: requests with a Host that is not this machine, and
POSTs from another origin, are refused. One lock lets one request at a time use the models.
"""

import base64
import http.server
import json
import os
import secrets
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from detectors.drawing import colour_of, ink_on
from storage.safe_json import parse_json
from storage.sample import Sample
from storage.settings import from_json
from vlbert.data.image_file import IMAGES
from vlbert.evaluation.results_page import render
from vlbert.predict.attention import panel_images
from vlbert.predict.prediction import Prediction, drawn_shapes_alone, predict_in_turn
from vlbert.predict.ranking import Ranker
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

if TYPE_CHECKING:
    from vlbert.predict.command import Predictor

HOST, PORT = "127.0.0.1", 8000
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MOST_SAMPLES = 16  # images whose regions are kept, the last ones that were used
_MOST_QUESTION = 2**20  # bytes of a question
_SILENT_SECONDS = 30  # that a client may take for its next bytes


@dataclass(frozen=True)
class Form:
    """What a checkpoint can be asked: the fields of a form, and what its numbers mean.

    text, captions, answer: the label of that field, or "". choices, rationales: how many fields of these. example: of
    a text; drawn: the same for a model of drawn shapes. masks: whether [MASK] and masked regions are asked for.
    """

    title: str
    meaning: str
    text: str = ""
    captions: str = ""
    answer: str = ""
    choices: int = 0
    rationales: int = 0
    example: str = ""
    drawn: str = ""
    masks: bool = False
    mentions: bool = False


_PRETRAINING = Form(
    "Fill in masked words and regions",
    "Numbers are probabilities: of one token among all, of one class among all; for several masks their product.",
    text="Caption, with [MASK] for each word to fill in",
    example="a [MASK] on a table",
    drawn="a [MASK] star and a red [MASK]",
    masks=True,
)
_VQA = Form(
    "Answer a question",
    "Numbers are probabilities of answers from the task's list.",
    text="Question",
    example="What is on the table?",
    drawn="What color is the star?",
)
_REFCOCO = Form(
    "Find the region of an expression",
    "Numbers are probabilities, of each region by itself: they do not sum to 1.",
    text="Expression",
    example="the left cup",
    drawn="the small red star",
)
_RETRIEVAL = Form(
    "Rank captions",
    "Numbers are probabilities, of each caption by itself: that it belongs to the image.",
    captions="Captions, one a line",
    example="a cup on a table\na dog on a sofa",
    drawn="a red star\na blue ring left of a white cross",
)
_OWN = Form("Ask", "Numbers are probabilities.", text="Text")
_FORMS = {
    PretrainingSettings: _PRETRAINING,
    VQASettings: _VQA,
    RefCOCOSettings: _REFCOCO,
    RetrievalSettings: _RETRIEVAL,
}


def forms_of(predictors: Sequence["Predictor"], ranks: bool) -> list[Form]:
    """The forms of one predictor, or of VCR's two; ranks: whether the checkpoint can rank captions."""
    settings = predictors[0].recipe.task
    if isinstance(settings, VCRSettings):
        subtasks = [predictor.subtask for predictor in predictors]
        what = " and ".join(f"{'an' if one == 'answer' else 'a'} {one}" for one in subtasks)
        return [
            Form(
                f"Choose {what}",
                "Numbers are probabilities among the four choices.",
                text="Question; [1] or [1,2] mention regions",
                answer="" if "answer" in subtasks else "Answer to explain",
                choices=4 if "answer" in subtasks else 0,
                rationales=4 if "rationale" in subtasks else 0,
                example="Why does [1] look at [2]?",
                drawn="How does [1] differ from [2]?",
                mentions=True,
            )
        ]
    own = _FORMS.get(type(settings), _OWN)
    return [own] if own is _RETRIEVAL or not ranks else [own, _RETRIEVAL]


@dataclass(frozen=True)
class Question:
    """What the page sends: the id of an image, and the fields of a form. Captions are ranked, all else is asked."""

    image: str
    text: str = ""
    captions: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    rationales: tuple[str, ...] = ()
    answer: str = ""
    mask_regions: tuple[int, ...] = ()
    attention: bool = False


class _Refused(Exception):
    """A request that is not answered: the status of HTTP, and a sentence for the page."""

    def __init__(self, status: int, sentence: str):
        super().__init__(status, sentence)
        self.status = status
        self.sentence = sentence


class PredictionServer:
    """The page of predictors, served in threads while the `with` block runs:

        with PredictionServer([Predictor("demo-root/runs/pretrain")], port=0) as server:
            print(server.url)

    ranking: the predictor of retrieval with the same regions, where captions can be ranked. notes: sentences to show.
    port: 0 takes any free one. ValueError where it is taken.
    """

    def __init__(
        self,
        predictors: Sequence["Predictor"],
        ranking: "Predictor | None" = None,
        notes: Sequence[str] = (),
        port: int = PORT,
    ):
        self.predictors = predictors
        self.ranking = ranking
        self.notes = [*filter(None, [drawn_shapes_alone(predictors[0].detector.metadata)]), *notes]
        self._samples: OrderedDict[str, Sample] = OrderedDict()
        self._lock = threading.Lock()  # the models, the samples, and matplotlib are of one thread at a time
        try:
            self._server = _Server((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"port {port} cannot be used: {reason}; name another: --port N") from error
        self._server.page = self
        self.url = f"http://{HOST}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="prediction-server", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def busy(self) -> bool:
        """Whether a request is using the models."""
        return self._lock.locked()

    def html(self) -> bytes:
        """The page; its script has a nonce, so that nothing else on it runs."""
        drawn = drawn_shapes_alone(self.predictors[0].detector.metadata) != ""
        values = {
            "nonce": secrets.token_urlsafe(16),
            "forms": forms_of(self.predictors, self.ranking is not None),
            "drawn": drawn,
            "notes": self.notes,
            "facts": [row for predictor in self.predictors for row in facts_of(predictor)],
            "classes": self.predictors[0].detector.metadata.get("classes") or [],
            "most_bytes": IMAGES.max_bytes,
        }
        return render(Path(__file__).parent / "prediction.html.j2", values).encode()

    def regions(self, data: bytes) -> dict[str, Any]:
        """The image as it would be stored, and its regions."""
        with self._lock:
            sample = self.predictors[0].detect(data)
            prediction = self.predictors[0](sample)
            key = secrets.token_hex(8)
            self._samples[key] = sample
            while len(self._samples) > _MOST_SAMPLES:
                self._samples.popitem(last=False)
        boxes = [
            _box(sample, box, number, name)
            for number, (box, name) in enumerate(zip(sample.regions.boxes, prediction.names, strict=True), 1)
        ]
        return {"image": key, "src": _uri("image/jpeg", sample.image), "regions": boxes}

    def answer(self, question: Question) -> list[dict[str, Any]]:
        """The answers to a question; several where VCR's rationale follows."""
        with self._lock:
            sample = self._samples.get(question.image)
            if sample is None:
                raise _Refused(410, "this image was dropped too long ago: drop it once more")
            self._samples.move_to_end(question.image)
            if question.captions:
                return [self._ranked(sample, question)]
            if not question.text.strip() and not question.mask_regions:
                raise ValueError("there is nothing to answer yet: write a text")
            found = predict_in_turn(
                self.predictors,
                sample,
                question.text if question.text.strip() else None,
                question.choices,
                question.rationales,
                question.answer,
                question.mask_regions,
                question.attention,
            )
            return [_answer(prediction, question.attention) for prediction in found]

    def _ranked(self, sample: Sample, question: Question) -> dict[str, Any]:
        if self.ranking is None:
            raise ValueError("this checkpoint ranks no captions")
        ranking = Ranker(self.ranking.model, self.ranking.recipe, self.ranking.detect)
        found = ranking.captions(sample, question.captions)
        images = []
        if question.attention:  # of the caption that fits best
            images = panel_images(self.ranking(sample, found[0][0], attentions=True))
        return {
            "question": "",
            "answer": found[0][0],
            "lines": found,
            "boxes": [],
            "attention": [_uri("image/png", image) for image in images],
        }


def facts_of(predictor: "Predictor") -> list[tuple[str, str]]:
    """What a checkpoint and its detector record of themselves."""
    config, state = predictor.checkpoint.config, predictor.checkpoint.state
    model, metadata = predictor.checkpoint.model_config, predictor.detector.metadata
    rows = [("checkpoint", predictor.checkpoint.where), ("recipe", config.get("recipe", {}).get("name", ""))]
    rows += [("model", f"layers {model.layers}, {model.hidden_size} channels")]
    rows += [("steps", str(state.get("step", "")))]
    rows += [("trained on", ", ".join(f"{one['dataset']} ({one['stage']})" for one in state.get("data", [])))]
    weights = metadata.get("weights_file") or "random weights"
    rows += [("detector", f"{predictor.detector.id}, {weights}")]
    return [(name, value) for name, value in rows if value]


def _answer(prediction: Prediction, attention: bool) -> dict[str, Any]:
    row, sample = prediction.row, prediction.sample
    lines = prediction.lines()
    images = panel_images(prediction) if attention else []
    return {
        "question": row["question"],
        "answer": row["answer"],
        "lines": lines[1:] if row["question"] else lines,
        "boxes": [_box(sample, box["box"], box["region"], box["name"]) for box in row["boxes"]],
        "attention": [_uri("image/png", image) for image in images],
    }


def _box(sample: Sample, box: Sequence[float], number: int, name: str) -> dict[str, Any]:
    """A box as the page draws it: left, top, width and height in % of the image, and colours of CSS."""
    left, top, right, bottom = (float(side) for side in box)
    percent = [100 * left / sample.width, 100 * top / sample.height]
    percent += [100 * (right - left) / sample.width, 100 * (bottom - top) / sample.height]
    colour = colour_of(number)
    return {
        "number": number,
        "name": name,
        "box": [round(value, 3) for value in percent],
        "colour": f"rgb{colour}",
        "ink": f"rgb{ink_on(colour)}",
    }


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# --- HTTP -------------------------------------------------------------------------------------------------------------


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True  # a forward pass in a thread does not keep the program from ending
    page: PredictionServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Browsers may hang up or fall silent; any other error is one of this program and is printed."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection per request (HTTP/1.0)."""

    server: _Server
    server_version, sys_version = "vlbert", ""
    timeout = _SILENT_SECONDS

    def do_GET(self) -> None:
        try:
            self._check_host()
        except _Refused as refused:
            return self._reply(refused.status, "text/plain; charset=utf-8", f"{refused.sentence}\n".encode())
        if self.path.partition("?")[0] != "/":
            return self._reply(404, "text/plain; charset=utf-8", b"there is one page, /\n")
        return self._reply(200, "text/html; charset=utf-8", self.server.page.html())

    def do_POST(self) -> None:
        try:
            self._check_host()
            self._check_origin()
            status, found = 200, self._work()
        except _Refused as refused:
            status, found = refused.status, {"error": refused.sentence}
        except (ValueError, OSError) as error:
            if isinstance(error, (ConnectionError, TimeoutError)):
                raise
            status, found = 400, {"error": str(error)}
        except Exception as error:  # noqa: BLE001  the page tells it, and the terminal has the traceback
            self.server.handle_error(self.request, self.client_address)
            status, found = 500, {"error": f"the program failed, see its terminal: {type(error).__name__}: {error}"}
        self._reply(status, "application/json", json.dumps(found).encode())

    def _work(self) -> Any:
        page = self.server.page
        if self.path == "/regions":
            return page.regions(self._body(IMAGES.max_bytes, "the image"))
        if self.path == "/answer":
            values = parse_json(self._body(_MOST_QUESTION, "the question"), "the question", fix="load the page again")
            return page.answer(from_json(Question, values, "the question"))
        raise _Refused(404, f"nothing is answered at {self.path}")

    def _body(self, most: int, what: str) -> bytes:
        declared = self.headers.get("Content-Length", "")
        if not declared.isascii() or not declared.isdecimal():
            raise _Refused(411, f"{what} comes without its length")
        if len(declared) > 15 or int(declared) > most:
            raise _Refused(413, f"{what} is too large: {declared} bytes, at most {most} are taken")
        body = self.rfile.read(int(declared))
        if len(body) < int(declared):
            raise _Refused(400, f"{what} is torn: {len(body)} of {declared} bytes came")
        return body

    def _check_host(self) -> None:
        """A page whose own name was made to lead here sends that name (DNS rebinding)."""
        host = self.headers.get("Host", "")
        if _hostname(f"//{host}") not in _LOOPBACK:
            raise _Refused(403, f"the host {host!r} is refused: open http://{HOST}:{self.server.server_address[1]}/")

    def _check_origin(self) -> None:
        """A browser says which page sends a POST."""
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "same-origin")
        own = f"http://{self.headers['Host']}".lower()
        if (origin is not None and origin.lower() != own) or site not in ("same-origin", "none"):
            raise _Refused(403, "a page of another site may not ask here")

    def _reply(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": content_type,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal is for what goes wrong."""


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def serve(predictors: Sequence["Predictor"], ranking: "Predictor | None", notes: Sequence[str], port: int) -> None:
    """Serves the page until Ctrl-C or SIGTERM."""
    stop = threading.Event()
    with PredictionServer(predictors, ranking, notes, port) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        for note in server.notes[: len(server.notes) - len(notes)]:  # the others were warnings
            print(f"note: {note}", file=sys.stderr)
        print(f"open {server.url} (Ctrl-C ends it)", flush=True)
        stop.wait()
    if server.busy:
        sys.stderr.flush()
        os._exit(0)  # the interpreter would wait for what a thread computes
