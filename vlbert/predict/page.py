"""The page of `vlbert predict CHECKPOINT --serve`, for the browsers of this machine.

It listens on 127.0.0.1 alone. A page of another site cannot use it: requests with a Host that is not this machine, and
POSTs from another origin, are refused. One lock lets one request at a time use the model; others wait, up to a limit.
"""

import base64
import os
import secrets
import signal
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from detectors.drawing import colour_of, ink_on
from storage.sample import Sample
from vlbert.data.image_file import IMAGES
from vlbert.evaluation.results_page import render
from vlbert.predict.attention import draw_attention
from vlbert.predict.predictor import Predictor
from vlbert.predict.ranking import Ranker
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

HOST = "127.0.0.1"
_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # as a browser of this machine, or behind a tunnel, names it
_MOST_SAMPLES = 16  # images whose regions are kept, the last ones that were used
_MOST_QUESTION = 2**20  # bytes of a question
_MOST_CONNECTIONS = 16  # a further one is answered with 503
_FORMS = {  # of the template
    PretrainingSettings: "pretraining",
    VQASettings: "vqa",
    RefCOCOSettings: "refcoco",
    VCRSettings: "vcr",
    RetrievalSettings: "retrieval",
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Question(BaseModel):
    """What the page sends: the id of an image, and the fields of its form. Captions are ranked, all else is asked."""

    image: str
    text: str = ""
    captions: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    answer: str = ""
    mask_regions: tuple[int, ...] = ()
    attention: bool = False


class PredictionServer:
    """The page of a predictor, served in threads while the `with` block runs:

        with PredictionServer(Predictor("demo-root/runs/pretrain"), port=0) as server:
            print(server.url)

    notes: sentences to show. port: 0 takes any free one. ValueError where it is taken.
    """

    def __init__(self, predictor: Predictor, notes: Sequence[str] = (), port: int = 0):
        self.predictor, self.notes = predictor, notes
        self._samples: OrderedDict[str, Sample] = OrderedDict()
        self._lock = threading.Lock()  # the model, the samples, and matplotlib are of one thread at a time
        try:
            self._socket = socket.create_server((HOST, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"port {port} cannot be used: {reason}; name another: --port N") from error
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}/"
        config = uvicorn.Config(
            self._app(), http="h11", ws="none", lifespan="off", log_level="error", limit_concurrency=_MOST_CONNECTIONS
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(2)

    @property
    def busy(self) -> bool:
        """Whether a request uses the model."""
        return self._lock.locked()

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)  # its pages load from elsewhere
        app.add_middleware(RequestBodyLimitMiddleware, max_body_size=_MOST_QUESTION)
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS)
        app.middleware("http")(_guard)
        for kind in (ValueError, OSError):
            app.add_exception_handler(kind, lambda _, error: JSONResponse({"detail": str(error)}, 400))
        app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=400))
        app.get("/", response_class=HTMLResponse)(self.html)
        app.post("/answer")(self.answer)
        app.router.routes.append(Route("/regions", self._regions, methods=["POST"], max_body_size=IMAGES.max_bytes))
        return app

    def html(self) -> str:
        """The page; its script has a nonce, so that nothing else on it runs."""
        task, metadata = self.predictor.recipe.task, self.predictor.detector.metadata
        values = {
            "nonce": secrets.token_urlsafe(16),
            "form": _FORMS.get(type(task), "own"),
            "explains": getattr(task, "subtask", "") == "rationale",
            "notes": self.notes,
            "checkpoint": self.predictor.checkpoint.where,
            "detector": f"{self.predictor.detector.id}, {metadata.get('weights_file') or 'random weights'}",
            "classes": metadata.get("classes") or [],
            "most_bytes": IMAGES.max_bytes,
        }
        return render(Path(__file__).parent / "prediction.html.j2", values)

    async def _regions(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self.regions, await request.body()))

    def regions(self, data: bytes) -> dict[str, Any]:
        """The image as it would be stored, and its regions."""
        with self._lock:
            sample = self.predictor.detect(data)
            named = zip(sample.regions.boxes, self.predictor(sample).names, strict=True)
            key = secrets.token_hex(8)
            self._samples[key] = sample
            while len(self._samples) > _MOST_SAMPLES:
                self._samples.popitem(last=False)
        boxes = [_box(box, number, name) for number, (box, name) in enumerate(named, 1)]
        return {"image": key, "src": _uri("image/jpeg", sample.image), "regions": boxes}

    def answer(self, question: Question) -> dict[str, Any]:
        """The answer to a question: of captions the one that fits best, with all of them ranked."""
        with self._lock:
            sample = self._samples.get(question.image)
            if sample is None:
                raise HTTPException(410, "this image was dropped too long ago: drop it once more")
            self._samples.move_to_end(question.image)
            ranking, text = [], question.text if question.text.strip() else None
            if question.captions:
                if not isinstance(self.predictor, Ranker):
                    raise ValueError("this checkpoint ranks no captions")
                ranking = self.predictor.captions(sample, question.captions)
                text = ranking[0][0]
            elif text is None and not question.mask_regions:
                raise ValueError("there is nothing to answer yet: write a text")
            asked = (text, question.choices, question.answer, question.mask_regions)
            prediction = self.predictor(sample, *asked, question.attention)
            figure = draw_attention(prediction) if question.attention else None
        row, lines = prediction.row, prediction.lines()
        return {
            "question": "" if ranking else row["question"],
            "answer": text if ranking else row["answer"],
            "lines": ranking or (lines[1:] if row["question"] else lines),
            "boxes": [_box(one["box"], one["region"], one["name"]) for one in row["boxes"]],
            "attention": figure and _uri("image/png", figure),
        }


async def _guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuses POSTs of other sites' pages: a browser says which page sends one."""
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "same-origin")
    own = f"http://{request.headers.get('Host')}".lower()
    if request.method != "GET" and ((origin or own).lower() != own or site not in ("same-origin", "none")):
        response: Response = JSONResponse({"detail": "a page of another site may not ask here"}, 403)
    else:
        response = await answer(request)
    response.headers.update(_HEADERS)
    return response


def _box(box: Sequence[float], number: int, name: str) -> dict[str, Any]:
    """A box as the page draws it: x1 y1 x2 y2 in pixels of the image, and colours of CSS."""
    colour = colour_of(number)
    sides = [round(float(side), 2) for side in box]
    return {"number": number, "name": name, "box": sides, "colour": f"rgb{colour}", "ink": f"rgb{ink_on(colour)}"}


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def serve(predictor: Predictor, notes: Sequence[str], port: int) -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    stop = threading.Event()
    with PredictionServer(predictor, notes, port) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        print(f"open {server.url} (Ctrl-C ends it)", flush=True)
        stop.wait()
        if server.busy:
            sys.stderr.flush()
            os._exit(0)  # without waiting for what a thread computes
