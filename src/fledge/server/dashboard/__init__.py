"""The dashboard at `/`: health, whether speculation pays, and a chat to try it.

Serves its files and its data. All URLs are relative, so a path prefix needs no configuration.
"""

import hashlib
import mimetypes
import re
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.server.drafter_monitor import drafter_panel, growth_of
from fledge.server.errors import RequestError
from fledge.server.history import HistoryInterval, SpeedupEstimate, estimate_speedup, explain, note, ratio
from fledge.server.metrics import PHASES, RECENT_INTERVALS, Metrics, kv_usage

TILE_INTERVALS = 5  # ten seconds: the window of present rates

HEADERS = {
    # Only our own scripts and styles, no other hosts: the page shows text of models and clients.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidated each time
}
FILES = ("page.css", "page.js", "charts.js", "chat.js", "drafter.js", "icon.svg")


def router(metrics: Metrics, *, authorize: Callable[[Request], Awaitable[Any]] | None = None) -> APIRouter:
    """Return the routes of the dashboard. `authorize` raises to refuse requests for data; the files are public."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/dashboard/data", dependencies=[] if authorize is None else [Depends(authorize)])
    async def data(response: Response, after: str = "-1") -> dict[str, Any]:
        if not re.fullmatch(r"-1|[0-9]{1,15}", after):
            raise RequestError("after: expected the number of an interval", param="after")
        response.headers["Cache-Control"] = "no-store"
        return snapshot(metrics, int(after))

    routes.add_api_route("/", _static_file("index.html"), methods=["GET"], response_class=Response)
    for name in FILES:
        routes.add_api_route(f"/dashboard/{name}", _static_file(name), methods=["GET"], response_class=Response)
    return routes


def _static_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that sends a static file."""
    body = (resources.files(__package__) / "static" / name).read_bytes()
    tag = hashlib.blake2b(body, digest_size=8).hexdigest()
    headers = {**HEADERS, "ETag": f'"{tag}"'}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=mimetypes.guess_type(name)[0])

    return answer


def snapshot(metrics: Metrics, after: int = -1) -> dict[str, Any]:
    """Return the JSON values of the dashboard; of the history only intervals after number `after`."""
    with metrics.lock:
        history, stats = metrics.history, metrics.stats
        recent, whole, closed = history.latest(RECENT_INTERVALS), history.latest(history.kept), history.closed()
    window = recent if recent["rounds"] or recent["acceptance"] else whole
    estimate = estimate_speedup(window, stats)
    seconds = history.interval_seconds
    notes, monitor = explain(window, stats, has_drafter=metrics.has_drafter), metrics.drift_monitor
    if monitor is not None and monitor.is_drifting:
        notes.insert(1, monitor.note)
    elif monitor is None and metrics.has_drafter:
        notes.append(note("no_baseline"))
    if metrics.drafter_monitor is not None:
        notes += metrics.drafter_monitor.notes
    return {
        "server": {
            "model": metrics.model_name,
            "version": metrics.version,
            "has_drafter": metrics.has_drafter,
            "drafter": metrics.drafter,
            "switchable": metrics.switchable,
            "started": metrics.started,  # also identifies this run of the server
            "uptime_s": time.time() - metrics.started,
        },
        "interval_s": seconds,
        "kept_intervals": history.kept,
        "tiles": _tiles(metrics, HistoryInterval.sum(closed[-TILE_INTERVALS:]), window, estimate),
        "window_s": window.intervals * seconds,
        "now_s": TILE_INTERVALS * seconds,
        "findings": [one._asdict() for one in notes],
        "templates": [
            {"hash": template.digest, "requests": whole["requests"][template]}
            | _acceptance(template.name, part, estimate)
            for template, part in sorted(whole.templates.items(), key=lambda item: -item[1].rounds)
        ],
        "contexts": [_acceptance(bucket, part, estimate) for bucket, part in whole.contexts.items()],
        "baseline": []
        if monitor is None or monitor.latest is None
        else [
            {"depth": depth + 1, "rate": rate.value, "low": rate.ends[0], "high": rate.ends[1], "expected": expected}
            for depth, rate, expected in monitor.latest.depths
        ],
        "drafter": drafter_panel(whole, metrics.baseline),
        "points": [_point(interval, seconds) for interval in closed if interval.number > after],
    }


def _tiles(
    metrics: Metrics, now: HistoryInterval, window: HistoryInterval, estimate: SpeedupEstimate
) -> dict[str, Any]:
    stats, total = metrics.stats, metrics.total
    rates = _rates(now, now.intervals * metrics.history.interval_seconds)
    return {
        "output_tokens_per_s": rates["output"],
        "prompt_tokens_per_s": rates["prompt"],
        "user_tokens_per_s": rates["user"],
        "ttft_s": rates["ttft"],
        "acceptance_length": window.acceptance.acceptance_length,
        "speed_up": estimate.value,
        "break_even": estimate.break_even,
        "depth": estimate.arm.depth or None,
        "batch": estimate.batch or None,
        "fallback_ratio": window.fallback_ratio,
        "fallback": stats.drafter_failure is not None,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_use": kv_usage(stats),
        "prefix_hit_rate": ratio(stats.prefix_hits, stats.prefix_queries),
        "preemptions": stats.preemptions,
        "rejected": total["requests_rejected"].total(),
        "finished": total["request_success"].total(),
    }


def _acceptance(name: str, part: AcceptanceStatistics, estimate: SpeedupEstimate) -> dict[str, Any]:
    length = part.acceptance_length
    return {
        "name": name,
        "rounds": part.rounds,
        "acceptance_length": length,
        "rate_by_depth": [round(rate, 4) for rate in part.rate_by_depth],
        "pays": None if length is None or estimate.break_even is None else length >= estimate.break_even,
    }


def _rates(interval: HistoryInterval, seconds: float) -> dict[str, float | None]:
    tokens, ttft = interval["tokens"], interval["ttft"]
    return {
        "output": ratio(tokens["output"], seconds),
        "prompt": ratio(tokens["prompt"], seconds),
        "user": ratio(interval["round_tokens"].total(), interval["token_gap_seconds"][""]),
        "ttft": ratio(ttft["seconds"], ttft["requests"]),
    }


def _point(interval: HistoryInterval, seconds: float) -> dict[str, Any]:
    phases = interval["spec_decode_phase_seconds"]
    return {
        "n": interval.number,
        **_rates(interval, seconds),
        "length": interval.acceptance.acceptance_length,
        "depths": [round(rate, 4) for rate in interval.acceptance.rate_by_depth],
        "growth": [round(value, 4) for value in growth_of(interval).by_depth],
        "phases": [phases[phase] for phase in PHASES],
        **interval.gauges,
    }
