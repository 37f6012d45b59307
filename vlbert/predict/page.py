"""Serve the web page of `vlbert predict CHECKPOINT --serve` to browsers on this computer.

The server listens only on 127.0.0.1. Pages of other web sites cannot use it, because it refuses requests whose Host
header names another host, and POST requests from another origin. It handles one request at a time. The others wait.
"""

import asyncio
import base64
import os
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from detectors.drawing import colour_of, ink_on
from detectors.image_file import IMAGES
from storage.safe_json import parse_json, printable
from storage.sample import Sample
from storage.settings import from_json
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
_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # Host header of a browser on this machine, or behind a tunnel
_MAX_SAMPLES = 16  # latest images whose regions are kept
_MAX_CONNECTIONS = 512  # further ones are answered with 503
_MAX_QUESTION = 2**22  # bytes
_MAX_BODIES = 5 * IMAGES.max_bytes // 2  # bytes of all requests together; further ones wait before they are read
_BODY_SECONDS = 60.0  # for a body to arrive
_FORMS = {  # settings -> form of the template
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


@dataclass(frozen=True)
class Question:
    """A question from the page: the id of an image, and the fields of the form. `captions` are texts to rank."""

    image: str
    text: str = ""
    captions: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    answer: str = ""
    mask_regions: tuple[int, ...] = ()
    attention: bool = False


def page_app(predictor: Predictor) -> FastAPI:
    """Return the web app that serves the page, finds the regions of uploaded images, and answers questions."""
    samples: dict[str, Sample] = {}
    lock = threading.Lock()  # model, samples and matplotlib are used by one thread at a time
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)  # FastAPI's own pages load files from other sites
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=IMAGES.max_bytes)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS)
    app.middleware("http")(_guard)
    for kind in (ValueError, OSError, ClientDisconnect):
        app.add_exception_handler(kind, lambda _, error: JSONResponse({"detail": printable(error)}, 400))
    free, changed = _MAX_BODIES, asyncio.Condition()

    async def read_body(request: Request) -> AsyncIterator[bytes]:
        """Read a request's body as soon as there is room for it beside all bodies in memory."""
        nonlocal free
        size = min(int(request.headers.get("content-length", IMAGES.max_bytes)), IMAGES.max_bytes)
        async with changed:  # room for the whole body, so that no two half-read ones wait for each other
            await changed.wait_for(lambda: free >= size)
            free -= size
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = await request.body()
            yield body
        except TimeoutError as error:
            raise HTTPException(408, f"the upload took over {_BODY_SECONDS:g} s", {"Connection": "close"}) from error
        finally:
            async with changed:
                free += size
                changed.notify_all()

    @app.get("/", response_class=HTMLResponse)
    def html() -> str:
        """Return the HTML page. A nonce makes the browser refuse to run any script but the page's own."""
        task, metadata = predictor.recipe.task, predictor.detector.metadata
        values = {
            "nonce": secrets.token_urlsafe(16),
            "form": _FORMS.get(type(task), "own"),
            "explains": getattr(task, "subtask", "") == "rationale",
            "checkpoint": predictor.checkpoint.uri,
            "detector": f"{predictor.detector.id}, {metadata.get('weights_file') or 'random weights'}",
            "classes": metadata.get("classes") or [],
            "most_bytes": IMAGES.max_bytes,
        }
        return render(Path(__file__).parent / "prediction.html.j2", values)

    @app.post("/regions")
    def regions(data: Annotated[bytes, Depends(read_body)]) -> dict[str, Any]:
        """Find the regions of an uploaded image. Returns the image's id, its stored JPEG and its regions."""
        with lock:
            sample = predictor.detect(data)
            named = zip(sample.require_regions().boxes, predictor(sample).names, strict=True)
            key = secrets.token_hex(8)
            samples[key] = sample
            if len(samples) > _MAX_SAMPLES:
                del samples[next(iter(samples))]
        boxes = [_describe_box(box, number, name) for number, (box, name) in enumerate(named, 1)]
        return {"image": key, "src": _data_uri("image/jpeg", sample.image), "regions": boxes}

    @app.post("/answer")
    def answer(data: Annotated[bytes, Depends(read_body)]) -> dict[str, Any]:
        """Answer a question about an image. If there are captions, rank them and return the best one as the answer."""
        location = f"the question (at most {_MAX_QUESTION} bytes)"  # its objects in memory are much larger
        question = from_json(Question, parse_json(data[:_MAX_QUESTION], location), location)
        with lock:
            sample = samples.get(question.image)
            if sample is None:
                raise HTTPException(410, "this image is no longer stored: drop it again")
            ranking, text = [], question.text if question.text.strip() else None
            if question.captions:
                if not isinstance(predictor, Ranker):
                    raise ValueError("this checkpoint cannot rank captions; serve one of retrieval")
                ranking = predictor.captions(sample, question.captions)
                text = ranking[0][0]
            elif text is None and not question.mask_regions:
                raise ValueError("the text is empty: write a text")
            arguments = (text, question.choices, question.answer, question.mask_regions)
            prediction = predictor(sample, *arguments, question.attention)
            figure = draw_attention(prediction) if question.attention else None
        row, lines = prediction.row, prediction.lines()
        assert row is not None  # it has a text or masked regions
        return {
            "question": "" if ranking else row["question"],
            "answer": printable(text if ranking else row["answer"]),
            "lines": ranking or (lines[1:] if row["question"] else lines),
            "boxes": [_describe_box(box["box"], box["region"], box["name"]) for box in row["boxes"]],
            "attention": figure and _data_uri("image/png", figure),
        }

    return app


async def _guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse POST requests from pages of other web sites, and add security headers to all responses."""
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "same-origin")
    own = f"http://{request.headers.get('Host')}".lower()
    if request.method != "GET" and ((origin or own).lower() != own or site not in ("same-origin", "none")):
        response: Response = JSONResponse({"detail": "requests from another site are refused"}, 403)
    else:
        response = await answer(request)
    response.headers.update(_HEADERS)
    return response


def _describe_box(box: Sequence[float], number: int, name: str) -> dict[str, Any]:
    """Return a region's number, name, box (x1 y1 x2 y2 in pixels of the image) and CSS colours for the page."""
    colour = colour_of(number)
    sides, name = [round(float(side), 2) for side in box], printable(name)
    return {"number": number, "name": name, "box": sides, "colour": f"rgb{colour}", "ink": f"rgb{ink_on(colour)}"}


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def make_server(predictor: Predictor, port: int) -> uvicorn.Server:
    """Return the server of the page, which its method `run` starts."""
    options: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off", "access_log": False}
    options["limit_concurrency"] = _MAX_CONNECTIONS
    return uvicorn.Server(uvicorn.Config(page_app(predictor), HOST, port, **options))


def serve(predictor: Predictor, port: int) -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    page = threading.Thread(target=make_server(predictor, port).run, daemon=True)
    page.start()
    try:
        page.join()
        sys.exit(1)  # uvicorn could not start, and has printed why
    except KeyboardInterrupt:
        os._exit(0)  # without waiting for threads that compute
