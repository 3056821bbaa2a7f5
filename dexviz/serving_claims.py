"""Handler of the engine for the papers' claims about a pair."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields

from dexviz.claims import noise_claims
from dexviz.claims_records import ClaimsReport, ClaimsRequest
from dexviz.models import ModelPair
from dexviz.requests import CheckClaims, PairSpec
from dexviz.tasks import Task


class ClaimsHandler:
    """Serves requests with pairs that the server holds; passes take turns on its device."""

    def __init__(self, pair: Callable[[PairSpec, Task], ModelPair], device: threading.Lock) -> None:
        self._pair, self._device = pair, device

    def check(self, request: CheckClaims, task: Task) -> ClaimsReport:
        """The claims that are asked for; the device is taken until all of them are done or the task is cancelled."""
        asked = ClaimsRequest(**{field.name: getattr(request, field.name) for field in fields(ClaimsRequest)})
        pair = self._pair(request.pair, task)
        with task.holding(self._device, "claims, waiting for the device"):
            return noise_claims(pair, asked, progress=task.report, cancel=task.cancelled)
