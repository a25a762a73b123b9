"""Never comes back from its import."""

from __future__ import annotations

import threading

threading.Event().wait()
